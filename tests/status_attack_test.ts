/** status: races, and what a hostile agent or an unlucky moment may leave in its way. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  holdLock,
  loopDir,
  makeScratch,
  readJson,
  readLog,
  startProgram,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, refuse, status } from "./status_support.ts";

Deno.test("a pause request that is a folder pauses, and is gone after a resume", async () => {
  using scratch = makeScratch();
  const request = join(writeLoop(scratch, "night"), "pause.request");
  writeFile(join(request, "deep/file"), "x");
  assertEquals((await accept(scratch, ["--check-gate=night"])).reason, "paused");
  assert(!existsSync(request));
  await accept(scratch, ["--resume-loop=night"]);
  assertEquals((await accept(scratch, ["--check-gate=night"])).ok, true);
});

Deno.test("a command that waited while its loop was purged says that there is none", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night", {}, { status: "paused" });
  const lock = holdLock(join(dir, ".state.lock"));
  const waiting = finish(startProgram(scratch, "status", ["--resume-loop=night"]));
  await refuse(scratch, ["--resume-loop=night", "--lock-timeout=0"], /another command holds it/);
  Deno.removeSync(dir, { recursive: true });
  lock[Symbol.dispose]();
  const { code, stderr } = await waiting;
  assertEquals(code, 1);
  assertMatch(stderr, /^status: Cannot open loop "night": there is none in .*\nhint: .*\n$/);
  assert(!existsSync(dir));
});

Deno.test("a mistyped --task does not halt the loop that was asked about", async () => {
  using scratch = makeScratch();
  writeLoop(scratch, "night");
  await refuse(scratch, ["--check-gate=night", "--task=typo"], /Cannot open task "typo"/);
  assertEquals((await accept(scratch, ["--check-gate=night"])).ok, true);
});

Deno.test("new tasks are as private as their maker's umask says", async () => {
  using scratch = makeScratch();
  for (const [mask, mode] of [["077", 0o700], ["022", 0o755]] as const) {
    const prefix = ["sh", "-c", `umask ${mask}; exec "$@"`, "sh"];
    await status(scratch, [`--create-task=t${mask}`], { prefix });
    assertEquals(Deno.statSync(taskDir(scratch, `t${mask}`)).mode! & 0o777, mode);
  }
});

Deno.test("an audit while tasks move finds nothing missing of them", async () => {
  using scratch = makeScratch();
  const names = Array.from({ length: 300 }, (_, index) => `t${index}`);
  for (const name of names) {
    Deno.renameSync(writeTask(scratch, name, "complete"), taskDir(scratch, name));
  }
  const audits = Promise.all(Array.from({ length: 4 }, () => accept(scratch, ["--audit"])));
  let isOver = false;
  audits.finally(() => isOver = true);
  let moved = 0;
  while (!isOver && moved < names.length) {
    Deno.renameSync(taskDir(scratch, names[moved]!), taskDir(scratch, `complete/${names[moved]}`));
    moved++;
    await new Promise((wake) => setTimeout(wake, 2));
  }
  for (const { violations, untracked_tasks } of await audits) {
    assertEquals(untracked_tasks, 0);
    const messages = (violations as { message: string }[]).map(({ message }) => message);
    assertEquals(messages.filter((each) => !each.endsWith("not moved to tasks/complete/")), []);
  }
  assert(moved > 10, `only ${moved} tasks have moved`);
});

Deno.test("commands on one task at the same time lose nothing of each other", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one", "code_review");
  const commands = [
    ["--transition=implement", "--task=one"],
    ["--claim", "--task=one", "--session=me"],
    ["--transition=human_intervention", "--task=one", "--reason=a"],
    ["--transition=research", "--task=one", "--reason=b"],
    ["--release", "--task=one"],
    ["--transition=design", "--task=one", "--reason=c"],
  ];
  const results = await Promise.all(commands.map((args) => status(scratch, args)));
  const steps =
    commands.filter(([flag], index) =>
      flag!.startsWith("--transition") && results[index]!.code === 0
    ).length;
  const { history } = readJson(join(taskDir(scratch, "one"), ".state"));
  const taken = (history as unknown[]).length - 5;
  assertEquals(taken, steps, JSON.stringify(history));
  assertEquals((await accept(scratch, ["--audit"])).violations, []);
});

Deno.test("pauses, resumes, halts and approvals at the same time leave a state that one of them made", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const commands = [
    ["--pause-loop=night"],
    ["--resume-loop=night"],
    ["--halt-loop=night", "--reason=human_intervention"],
    ["--approve", "--loop=night"],
    ["--pause-loop=night"],
    ["--check-gate=night"],
    ["--approve", "--loop=night"],
    ["--resume-loop=night"],
  ];
  const results = await Promise.all(commands.map((args) => status(scratch, args)));
  for (const { code, stderr } of results) {
    assert(code === 0 || /^status: Cannot (pause|resume|approve)/.test(stderr), stderr);
  }
  const { status: word, halt_reason, resumed_count } = readJson(join(dir, ".state.loop"));
  assertEquals(word === "halted", halt_reason !== null);
  const events = readLog(scratch, "night").map(({ event }) => event);
  assertEquals(events.filter((event) => event === "APPROVED").length, resumed_count);
  const last = { PAUSED: "paused", RESUMED: "running", HALTED: "halted", APPROVED: "running" };
  assertEquals(last[events.at(-1) as keyof typeof last], word, events.join(" "));
});

Deno.test("texts from files do nothing to a terminal", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one", "research", { title: "a\u001b]0;owned\u0007b\u009b2Jc" });
  writeTask(scratch, "two", "\u001b[2J");
  writeTask(scratch, "three");
  writeFile(join(taskDir(scratch, "three"), ".state"), "\u001b[2J{");
  writeLoop(scratch, "night", {}, { worktree_path: "/x", status: "\u001b[31m" });
  for (
    const args of [["--task=one"], ["--task=two"], ["--task=three"], ["--audit"], ["--loop-list"], [
      "--check-gate=night",
    ]]
  ) {
    const { stdout, stderr } = await status(scratch, args);
    assert(!/[\p{Cc}--\n]/v.test(stdout + stderr), JSON.stringify(stdout + stderr));
  }
  const { stdout } = await status(scratch, ["--task=one"]);
  assertMatch(stdout, /^one: a\\u001b\]0;owned\\u0007b\\u009b2Jc\n/);
});

Deno.test("the name inside a state leads nowhere", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "implement", { name: "../../../loops" });
  await refuse(
    scratch,
    ["--transition=spec", "--task=one", "--reason=x"],
    /field name: found "\.\./,
  );
  writeTask(scratch, "two", "bug_hunt", { name: "other" });
  writeFile(join(taskDir(scratch, "two"), "BUG_REPORT.md"), "x");
  await accept(scratch, ["--transition=complete", "--task=two"]);
  assert(existsSync(taskDir(scratch, "complete/two")) && existsSync(dir));
  assert(!existsSync(taskDir(scratch, "complete/other")));
  const copied = writeLoop(scratch, "copied", {}, { name: "night", status: "paused" });
  const { stderr } = await status(scratch, ["--can-continue=copied"]);
  assertEquals(stderr, "hint: status --resume-loop copied\n");
  assertEquals(copied, loopDir(scratch, "copied"));
});

Deno.test("keys of JavaScript's own objects are fields like others", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one");
  const path = join(dir, ".state");
  const text = Deno.readTextFileSync(path).replace("{", '{"__proto__":{"phase":"complete"},');
  writeFile(path, text.replace('"title"', '"constructor":1,"toString":2,"title"'));
  const { phase } = await accept(scratch, ["--task=one"]);
  assertEquals(phase, "research");
  await accept(scratch, ["--claim", "--task=one", "--session=__proto__"]);
  const after = Deno.readTextFileSync(path);
  for (const words of ['"__proto__"', '"constructor": 1', '"toString": 2']) {
    assert(after.includes(words), after);
  }
  await refuse(scratch, ["--claim-loop-task=constructor", "--task=one"], /there is none/);
  const night = writeLoop(scratch, "night");
  writeFile(join(night, "loop.json"), '{"__proto__": {"brakes": {"max_iterations": 1}}}');
  assertEquals((await accept(scratch, ["--check-gate=night"])).remaining_iterations, 10);
});

/** status: the audit's six categories, in words and as JSON, and what it costs. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { join } from "@std/path";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  PHASE_DOCUMENTS,
  ROOT,
  run,
  type Scratch,
  snapshot,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, daysAgo, type Json, misuse, status } from "./status_support.ts";

interface Found {
  readonly category: number;
  readonly severity: string;
  readonly task: string | null;
  readonly loop: string | null;
  readonly message: string;
  readonly resolved: boolean;
}

async function audit(scratch: Scratch, ...args: readonly string[]): Promise<Found[]> {
  return (await accept(scratch, ["--audit", ...args])).violations as Found[];
}

/** Category, task and message of each finding. */
async function list(scratch: Scratch, ...args: readonly string[]): Promise<unknown[][]> {
  return (await audit(scratch, ...args)).map(({ category, task, message }) => [
    category,
    task,
    message,
  ]);
}

Deno.test("a project with nothing wrong in it has no findings", async () => {
  using scratch = makeScratch();
  for (const [index, [phase]] of PHASE_DOCUMENTS.entries()) writeTask(scratch, `t${index}`, phase);
  writeTask(scratch, "done", "complete");
  writeTask(scratch, "waits", "human_intervention");
  writeTask(scratch, "of-a-loop", "implement", { loop: "night" });
  writeLoop(scratch, "night", {}, { current_task: "of-a-loop", last_tick_at: daysAgo(0) });
  writeLoop(scratch, "never-ticked");
  writeFile(join(scratch.project, ".automaton/tasks/.hidden.x1/.state"), "a task in the making");
  writeFile(join(scratch.project, ".automaton/tasks/README.md"), "no task");
  const before = snapshot(scratch.project);
  const { violations, loops, total_tasks, untracked_tasks, ...rest } = await accept(scratch, [
    "--audit",
  ]);
  assertEquals([violations, total_tasks, untracked_tasks], [[], 9, 0]);
  assertEquals(rest, { schema_version: 1 });
  assertEquals(
    (loops as Json[]).map(({ name, status, iteration_count }) => [
      name,
      status,
      iteration_count,
    ]),
    [["never-ticked", "running", 0], ["night", "running", 0]],
  );
  assertEquals(Object.keys((loops as Json[])[0]!), [
    "name",
    "status",
    "halt_reason",
    "iteration_count",
    "last_tick_at",
    "schedule",
  ]);
  assertEquals(snapshot(scratch.project), before, "an audit changes nothing");
  const { stdout, stderr, code } = await status(scratch, ["--audit"]);
  assertEquals([code, stderr], [0, ""]);
  assertEquals(stdout.match(/: nothing found/g)?.length, 6);
});

Deno.test("an empty project is well", async () => {
  using scratch = makeScratch();
  const answer = await accept(scratch, ["--audit"]);
  assertEquals([answer.violations, answer.loops, answer.total_tasks], [[], [], 0]);
});

Deno.test("category 1: states that cannot be, or cannot be read", async () => {
  using scratch = makeScratch();
  const step = (from: string | null, to: string) => ({
    at: daysAgo(1),
    from,
    to,
    by: "person",
    reason: null,
  });
  writeFile(join(taskDir(scratch, "a-wild"), "note"), "x");
  writeTask(scratch, "b-torn");
  writeFile(join(taskDir(scratch, "b-torn"), ".state"), "{");
  writeTask(scratch, "c-lunch", "lunch");
  writeTask(scratch, "d-leap", "implement", {
    history: [step(null, "research"), step("research", "implement")],
  });
  writeTask(scratch, "e-gap", "design", {
    history: [step(null, "research"), step("spec", "design")],
  });
  writeTask(scratch, "f-end", "design", { history: [step(null, "research")] });
  writeTask(scratch, "g-unapproved", "implement", { approved_at: null });
  writeTask(scratch, "h-name", "research", { name: "other" });
  writeTask(scratch, "i-odd", "research", {
    history: [step(null, "lunch"), step("lunch", "research")],
  });
  writeTask(scratch, "j-wait", "implement", {
    history: [
      step(null, "research"),
      step("research", "human_intervention"),
      step("human_intervention", "implement"),
    ],
  });
  const broken = writeLoop(scratch, "night");
  writeFile(join(broken, ".state.loop"), "");
  const found = await list(scratch);
  assertEquals(found.map(([category]) => category), Array(11).fill(1));
  const messages = found.map(([, task, message]) => `${task}: ${message}`);
  const expected = [
    /^null: loop night has a broken state: Cannot parse ".*\.state\.loop": it is empty$/,
    /^a-wild: task a-wild has no \.state \(untracked\)$/,
    /^b-torn: Cannot parse ".*b-torn\/\.state": /,
    /^c-lunch: task c-lunch is in the unknown phase "lunch"$/,
    /^d-leap: .*impossible history: a step leaps from research to implement$/,
    /^e-gap: .*impossible history: a step leaves spec where the task was in research$/,
    /^f-end: .*impossible history: its history ends in research, not in design$/,
    /^g-unapproved: .*impossible history: it is in implement without a person's approval$/,
    /^h-name: task h-name calls itself other in its \.state$/,
    /^i-odd: .*impossible history: a step leads to the unknown phase "lunch"$/,
    /^j-wait: .*impossible history: a step leaps from research to implement$/,
  ];
  for (const [index, words] of expected.entries()) assertMatch(messages[index]!, words);
  const { total_tasks, untracked_tasks } = await accept(scratch, ["--audit"]);
  assertEquals([total_tasks, untracked_tasks], [10, 1]);
});

Deno.test("category 2: phases left without their document", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "code_review");
  Deno.removeSync(join(dir, "DESIGN.md"));
  writeFile(join(dir, "SPEC.md"), "  \n\n");
  writeFile(join(dir, "RESEARCH.md"), "\0".repeat(100));
  const waits = writeTask(scratch, "two", "human_intervention", { previous_phase: "spec" });
  Deno.removeSync(join(waits, "RESEARCH.md"));
  writeTask(scratch, "made-late", "implement", {
    history: [{ at: daysAgo(1), from: null, to: "implement", by: "person", reason: null }],
  });
  for (const document of ["RESEARCH.md", "DESIGN.md", "SPEC.md"]) {
    Deno.removeSync(join(taskDir(scratch, "made-late"), document));
  }
  assertEquals(await list(scratch), [
    [2, "one", "task one has left design without DESIGN.md"],
    [2, "one", "task one has left research without RESEARCH.md"],
    [2, "one", "task one has left spec without SPEC.md"],
    [2, "two", "task two has left research without RESEARCH.md"],
  ]);
});

Deno.test("category 3: approved or in work, and not touched for days", async (t) => {
  using scratch = makeScratch();
  const old = { updated_at: daysAgo(8) };
  writeTask(scratch, "approved", "implement", old);
  writeTask(scratch, "claimed", "research", { ...old, claimed_by: "me" });
  writeTask(scratch, "owned", "research", { ...old, loop: "night" });
  writeTask(scratch, "idle", "research", old);
  writeTask(scratch, "waits", "human_intervention", old);
  writeTask(scratch, "done", "complete", old);
  writeTask(scratch, "fresh", "implement", { updated_at: daysAgo(6) });
  const stalled = async (...args: string[]) =>
    (await audit(scratch, ...args)).map(({ category, severity, task }) => [
      category,
      severity,
      task,
    ]);
  await t.step("seven by default", async () => {
    const expected = ["approved", "claimed", "owned"].map((task) => [3, "med", task]);
    assertEquals(await stalled(), expected);
  });
  await t.step("or as many as are asked for", async () => {
    assertEquals((await stalled("--stalled-days=5")).length, 4);
    assertEquals(await stalled("--stalled-days=9"), []);
    await misuse(scratch, ["--audit", "--stalled-days=0"], /from 1 to/);
  });
  await t.step("in words that stay the same from day to day", async () => {
    const [{ message }] = await audit(scratch) as [Found];
    assertEquals(message, "task approved has not moved for more than 7 days");
  });
});

Deno.test("category 4: owners and scopes", async (t) => {
  using scratch = makeScratch();
  await t.step("two loops with one task", async () => {
    writeTask(scratch, "one", "implement", { loop: "a" });
    writeLoop(scratch, "a");
    writeLoop(scratch, "b", {}, { current_task: "one" });
    assertEquals(await list(scratch), [[4, "one", "task one is claimed by 2 loops: a, b"]]);
    writeLoop(scratch, "a", {}, { current_task: "one" });
    writeLoop(scratch, "c", {}, { current_task: "one" });
    assertEquals(await list(scratch), [[4, "one", "task one is claimed by 3 loops: a, b, c"]]);
  });
  await t.step("but not a loop that has done its work", async () => {
    writeLoop(scratch, "b", {}, { current_task: "one", status: "complete" });
    writeLoop(scratch, "c", {}, { current_task: null });
    assertEquals(await list(scratch), []);
  });
  await t.step("a task in a phase that its loop may not touch", async () => {
    writeTask(scratch, "waits", "human_intervention");
    writeLoop(scratch, "c", {}, { current_task: "waits" });
    writeLoop(scratch, "a", { allowed_phases: ["research"] }, { current_task: "one" });
    assertEquals(await list(scratch), [
      [4, "one", "loop a has task one in implement, where it may not work"],
      [4, "waits", "loop c has task waits in human_intervention, where it may not work"],
    ]);
  });
  await t.step("files outside a scope", async () => {
    using own = makeScratch();
    makeRepository(own, own.project, { "a.txt": "a\n", ".gitignore": ".automaton/\n" });
    const worktree = join(loopDir(own, "night"), "worktree");
    git(own, own.project, "worktree", "add", "--quiet", worktree, "-b", "loop/night");
    writeLoop(own, "night", { blast_radius: { file_scope: ["src"] } }, { worktree_path: worktree });
    writeFile(join(worktree, "a.txt"), "b\n");
    writeFile(join(worktree, 'new\n"'), "b\n");
    assertEquals(
      (await audit(own)).map(({ task: _, ...rest }) => rest),
      ['"a.txt"', '"new\\n\\""']
        .map((path) => ({
          category: 4,
          severity: "high",
          loop: "night",
          message: `loop night changed ${path} outside its file scope`,
          resolved: false,
        })),
    );
  });
});

Deno.test("category 5: complete, and something is still open", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "complete");
  writeFile(join(dir, "SPEC.md"), "- [x] done\n- [ ] open\n  * [ ] also\n\n\n+ [ ] and this\n");
  writeFile(join(dir, "BUG_REPORT.md"), "\n\n- [ ] a bug\ntext - [ ] no item\n");
  writeFile(join(dir, "DESIGN.md"), "- [ ] does not count\n");
  writeTask(scratch, "open", "implement");
  writeFile(join(taskDir(scratch, "open"), "SPEC.md"), "- [ ] still to do\n");
  Deno.renameSync(writeTask(scratch, "lies", "complete"), taskDir(scratch, "lies"));
  Deno.renameSync(writeTask(scratch, "back", "implement"), taskDir(scratch, "complete/back"));
  assertEquals(await list(scratch), [
    [5, "back", "task back lies in tasks/complete/ unfinished"],
    [5, "lies", "task lies is complete but not moved to tasks/complete/"],
    [5, "one", "task one is complete with 1 unchecked item in BUG_REPORT.md"],
    [5, "one", "task one is complete with 3 unchecked items in SPEC.md"],
  ]);
});

Deno.test("category 6: housekeeping", async (t) => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const found = async () => {
    const findings = await audit(scratch);
    assert(findings.every(({ severity, loop }) => severity === "low" && loop === "night"));
    return findings.map(({ category, message }) => `${category} ${message.replace(dir, "DIR")}`);
  };
  await t.step("an invalid loop.json", async () => {
    writeFile(join(dir, "loop.json"), '{"brakes": []}');
    assertEquals(await found(), [
      '6 loop night cannot be checked: Cannot use "DIR/loop.json": field brakes: found [], wanted ' +
      "an object",
    ]);
  });
  await t.step("a loop that sleeps too long", async () => {
    const late = { last_tick_at: new Date(Date.now() - 200_000).toISOString() };
    writeLoop(scratch, "night", { schedule: { interval_seconds: 60 } }, late);
    assertEquals(await found(), ["6 loop night has not ticked for more than three intervals"]);
    writeLoop(scratch, "night", { schedule: { interval_seconds: 70 } }, late);
    assertEquals(await found(), []);
    writeLoop(scratch, "night", { schedule: { interval_seconds: 60 } }, {
      ...late,
      status: "paused",
    });
    assertEquals(await found(), []);
  });
  await t.step("but not one that woke and had nothing to do", async () => {
    const late = { last_tick_at: daysAgo(3) };
    writeLoop(scratch, "night", { schedule: { interval_seconds: 60 } }, late);
    assertEquals((await found()).length, 1);
    writeFile(join(dir, ".state.lock"), '{"pid": 1}');
    assertEquals(await found(), []);
  });
  await t.step("worktrees that were left behind", async () => {
    writeLoop(scratch, "night", {}, { status: "complete" });
    Deno.mkdirSync(join(dir, "worktree"));
    Deno.mkdirSync(join(dir, "worktree.2026-11-30"));
    assertEquals(await found(), [
      "6 loop night leaves the folder DIR/worktree behind",
      "6 loop night leaves the folder DIR/worktree.2026-11-30 behind",
    ]);
    writeLoop(scratch, "night");
    Deno.removeSync(join(dir, "worktree.2026-11-30"));
    assertEquals(await found(), []);
  });
  await t.step("a log over its cap", async () => {
    writeFile(join(dir, ".state.log.1"), "x".repeat(5 * 1024 * 1024 + 1));
    assertEquals(await found(), ["6 loop night has .state.log.1 over its cap"]);
  });
});

Deno.test("findings come by severity, then category, then task, always in the same order", async () => {
  using scratch = makeScratch();
  for (const name of ["b", "a"]) {
    const dir = writeTask(scratch, name, "complete", { approved_at: null });
    Deno.renameSync(dir, taskDir(scratch, name));
    Deno.removeSync(join(taskDir(scratch, name), "DESIGN.md"));
    writeTask(scratch, `old-${name}`, "implement", { updated_at: daysAgo(30) });
  }
  writeLoop(scratch, "night", {}, { current_task: "b" });
  writeFile(join(writeLoop(scratch, "z"), "loop.json"), "");
  const order = (await audit(scratch)).map(({ severity, category, task }) =>
    `${severity} ${category} ${task}`
  );
  assertEquals(order, [
    "high 1 a",
    "high 1 b",
    "high 2 a",
    "high 2 b",
    "high 4 b",
    "med 3 old-a",
    "med 3 old-b",
    "med 5 a",
    "med 5 b",
    "low 6 null",
  ]);
  const [first, second] = await Promise.all([1, 2].map(() => status(scratch, ["--audit"])));
  assertEquals(first, second);
  assertEquals(first!.code, 0, "findings are no failure");
  assertMatch(
    first!.stdout,
    /^4 tasks \(0 untracked\), 2 loops\n\n1 State: 2\n {2}high {2}task a /,
  );
  assertMatch(first!.stdout, /\nLoops:\n {2}night: running\n {2}z: running\n$/);
  assertMatch(first!.stderr, /^hint: [^\n]*\n$/);
});

Deno.test("the audit of another edition's loop goes on with the rest", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "newer");
  writeFile(join(dir, ".state.loop"), '{"schema_version": 2}');
  writeTask(scratch, "one", "research", { schema_version: 9 });
  const found = await list(scratch);
  assertEquals(found.map(([category, task]) => [category, task]), [[1, null], [1, "one"]]);
  assertMatch(`${found[0]![2]}`, /schema_version 2 is newer than 1/);
});

/** Writes many small tasks quickly. */
function writeTasks(scratch: Scratch, count: number): void {
  const state = Deno.readTextFileSync(join(writeTask(scratch, "model", "design"), ".state"));
  for (let index = 1; index < count; index++) {
    const dir = taskDir(scratch, `task-${index}`);
    Deno.mkdirSync(dir);
    Deno.writeTextFileSync(join(dir, ".state"), state.replaceAll('"model"', `"task-${index}"`));
    Deno.linkSync(taskDir(scratch, "model/RESEARCH.md"), join(dir, "RESEARCH.md"));
  }
}

/** The shortest of a few audits, in milliseconds; of other processes only the longer ones tell. */
async function timeAudit(scratch: Scratch, count: number): Promise<number> {
  const times: number[] = [];
  for (let round = 0; round < 2; round++) {
    const start = performance.now();
    const { code, stdout } = await status(scratch, ["--audit", "--json"]);
    times.push(performance.now() - start);
    assertEquals([code, stdout.match(/\n/g)?.length], [0, 1], "one line");
    const { violations, total_tasks } = JSON.parse(stdout);
    assertEquals([violations, total_tasks], [[], count]);
  }
  return Math.min(...times);
}

Deno.test("the audit's time grows with the number of tasks and no faster", async () => {
  using none = makeScratch();
  using small = makeScratch();
  using large = makeScratch();
  writeTasks(small, 1_000);
  writeTasks(large, 10_000);
  const start = await timeAudit(none, 0);
  const [few, many] = [await timeAudit(small, 1_000), await timeAudit(large, 10_000)];
  // Ten times as many: ten times as long but for the start; a hundred times where it is quadratic.
  const ratio = (many - start) / Math.max(few - start, 5);
  assert(ratio < 25, `${start} ms, ${few} ms, ${many} ms: ratio ${ratio}`);
});

Deno.test("the audit's memory does not grow with the number of tasks", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "research", { ballast: "x".repeat(400_000) });
  for (let index = 0; index < 500; index++) {
    const other = taskDir(scratch, `task-${index}`);
    Deno.mkdirSync(other);
    Deno.linkSync(join(dir, ".state"), join(other, ".state"));
  }
  // As source also where the other tests run compiled programs, which take no such flag.
  const flags = ["-q", "--no-prompt", "-P=status", "--v8-flags=--max-old-space-size=48"];
  const words = [Deno.execPath(), "run", ...flags, join(ROOT, "scripts/status.ts")];
  const result = await run(scratch, [...words, "--audit", "--json"]);
  assertEquals([result.code, result.stderr.includes("heap limit")], [0, false]);
  assertEquals(JSON.parse(result.stdout).total_tasks, 501);
});

Deno.test("a document of many blank lines is no trap for the audit", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "complete");
  writeFile(join(dir, "SPEC.md"), "\n".repeat(300_000));
  writeFile(join(dir, "BUG_REPORT.md"), " ".repeat(300_000) + "- [ ]" + "\t".repeat(300_000));
  const start = performance.now();
  await audit(scratch);
  const once = performance.now() - start;
  for (const document of ["SPEC.md", "BUG_REPORT.md"]) {
    const text = Deno.readTextFileSync(join(dir, document));
    writeFile(join(dir, document), text.repeat(8));
  }
  const again = performance.now();
  await audit(scratch);
  assert(performance.now() - again < 20 * once, "eight times as much takes no 64 times as long");
});

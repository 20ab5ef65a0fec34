/**
 * How ticks begin and end: many at once, killed, paused, told to end, one after the other in a daemon;
 * and in odd places, with odd names, among damaged files.
 */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { basename, join } from "@std/path";
import {
  finish,
  git,
  isAlive,
  lastJson,
  loopDir,
  makeScratch,
  poll,
  readJson,
  readLog,
  type Result,
  ROOT,
  run,
  runProgram,
  type Scratch,
  snapshot,
  start,
  startProgram,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";
import {
  LOOP,
  type LoopPlan,
  makeLoop,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
  readState,
  readStateText,
  startTick,
  type Summary,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";
import { becomeNobody } from "./status_support.ts";

/** Busy machines are slow; nothing is asserted about how long things take. */
const PATIENCE = { timeoutMs: 120_000 };

/** What an agent does first that waits in the middle of its work until the test lets it go on. */
const WAIT =
  '(cd "$AUTOMATON_PROJECT/.." && { [ -e go ] || echo $$ >agent; } && wait_for "$PWD/go")';

/** A loop in a project without git, which is quicker. */
function makeQuickLoop(plan: LoopPlan = {}): Scratch {
  const config = { blast_radius: { worktree: false }, ...plan.config };
  return makeLoopScratch({ isRepository: false, ...plan, config });
}

/** The script of an agent that waits, then does what an honest one does in its role. */
function waitIn(role: "implement" | "verify" | "orchestrate"): LoopPlan {
  const honest = { implement: "echo x >>work.txt", verify: "verdict true 1", orchestrate: "" };
  const orchestrate = "step code_review";
  const script = `${WAIT} && ${role === "orchestrate" ? orchestrate : honest[role]}`;
  return { orchestrate, [role]: script };
}

/** The process id of an agent that waits, once there is one. */
function findAgent(scratch: Scratch): Promise<number> {
  return poll("waiting agent", () => {
    const path = join(scratch.dir, "agent");
    const text = existsSync(path) ? Deno.readTextFileSync(path) : "";
    return text.endsWith("\n") && Number(text);
  }, PATIENCE);
}

/** Lets agents that wait go on; those that start later do not wait any more. */
function letGo(scratch: Scratch): void {
  writeFile(join(scratch.dir, "go"), "");
}

/** Waits until a process is gone. */
async function awaitEnd(pid: number): Promise<void> {
  await poll(`end of ${pid}`, () => !isAlive(pid), PATIENCE);
}

/** A tick's summary from what its process left. */
function summaryOf(result: Result): Summary {
  return lastJson(result) as unknown as Summary;
}

// --- Many at once ---

Deno.test("of twenty ticks at once one runs, and the others skip with exit code 0", async () => {
  using scratch = makeQuickLoop(waitIn("implement"));
  let ended = 0;
  const ticks = Array.from({ length: 20 }, async () => {
    const result = await finish(startTick(scratch, ["--json"]), PATIENCE.timeoutMs);
    ended++;
    return result;
  });
  await findAgent(scratch);
  await poll("end of nineteen ticks", () => ended === 19, {
    ...PATIENCE,
    describe: () => `${ended} have ended`,
  });
  letGo(scratch);
  const results = await Promise.all(ticks);
  assertEquals(results.map(({ code }) => code), Array(20).fill(0));
  const summaries = results.map(summaryOf);
  const skipped = summaries.filter(({ skipped }) => skipped);
  assertEquals(skipped.map(({ ok, reason }) => [ok, reason]), [
    ...Array(19).fill([true, "tick_in_progress"]),
  ]);
  // The second is said where the one that runs has the lock and has not written its note yet.
  const words = /^(process \d+ is in a tick since 2.*Z|another command holds the loop)$/;
  for (const { message } of skipped) assertMatch(message!, words);
  const [ran] = summaries.filter(({ skipped }) => !skipped);
  assertEquals([ran?.ok, ran?.reason, ran?.iteration_count], [true, null, 1]);
  assertEquals(readState(scratch).iteration_count, 1);
  assertEquals(readLog(scratch, LOOP).filter(({ event }) => event === "TICK").length, 1);
  assertEquals(readJournal(scratch).length, 3);
});

Deno.test("ticks of two loops run side by side", async () => {
  using scratch = makeQuickLoop(waitIn("implement"));
  writeTask(scratch, "second", "implement", { loop: "day" });
  writeLoop(scratch, "day", {
    ...readJson(join(loopDir(scratch, LOOP), "loop.json")),
    harness: {
      command: ["sh", "-c", '[ "$1" = implement ] || echo "{\\"pass\\": true}"', "sh", "{role}"],
    },
  }, { current_task: "second" });
  const night = startTick(scratch, ["--json"]);
  await findAgent(scratch);
  assertEquals((await tick(scratch, ["--loop", "day"])).json.reason, null);
  letGo(scratch);
  assertEquals(summaryOf(await finish(night, PATIENCE.timeoutMs)).reason, null);
});

// --- Killed ---

for (const role of ["implement", "verify", "orchestrate"] as const) {
  Deno.test(`a runner that is killed in ${role} leaves its state as it was, and the next tick ends the orphan and works`, async () => {
    using scratch = makeLoopScratch({ ...waitIn(role), state: { of_tomorrow: 1 } });
    const before = readStateText(scratch);
    const killed = startTick(scratch);
    const agent = await findAgent(scratch);
    killed.kill("SIGKILL");
    assertEquals((await finish(killed)).signal, "SIGKILL");
    assertEquals(readStateText(scratch), before);
    assert(isAlive(agent), "the agent should have outlived its runner");
    Deno.removeSync(join(scratch.dir, "agent"));
    const next = startTick(scratch, ["--json"]);
    await awaitEnd(agent);
    await findAgent(scratch);
    letGo(scratch);
    const json = summaryOf(await finish(next, PATIENCE.timeoutMs));
    assertEquals([json.reason, json.tick, json.next_phase], [null, 1, "code_review"]);
    assertMatch(json.warnings.join(), /ended \d+ process\(es\) that an earlier tick left running/);
    const { iteration_count, of_tomorrow } = readState(scratch);
    assertEquals([iteration_count, of_tomorrow], [1, 1]);
  });
}

Deno.test("a runner that is killed just before its save leaves its state as it was, and the next tick goes on from there", async () => {
  using scratch = makeLoopScratch();
  writeScript(
    join(scratch.project, ".git/hooks/post-commit"),
    '#!/bin/sh\nrm "$AUTOMATON_PROJECT/../kill" || exit 0\n' +
      "note=$AUTOMATON_PROJECT/.automaton/loops/night/.state.lock\n" +
      'kill -9 "$(sed \'s/^{"pid":\\([0-9]*\\).*/\\1/\' "$note")"\n',
  );
  writeFile(join(scratch.dir, "kill"), "");
  const before = readStateText(scratch);
  const killed = await finish(startTick(scratch), PATIENCE.timeoutMs);
  assertEquals(killed.signal, "SIGKILL");
  assertEquals([readStateText(scratch), readPhase(scratch)], [before, "code_review"]);
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.tick, json.iteration_count], [null, 1, 1]);
  assertEquals([json.phase, json.next_phase], ["code_review", "bug_hunt"]);
  const commits = git(scratch, worktreeOf(scratch), "log", "--format=%s", "main..HEAD");
  assertEquals(commits.split("\n"), Array(2).fill(`loop(night): ${TASK} tick 1, score 1`));
});

Deno.test("processes of others are left alone, whatever the note in the lock file says", async (t) => {
  const host = Deno.hostname();
  const bystandersRun = crypto.randomUUID();
  // Where the runner fell for one of these, no more than the bystander would end: nothing is matched
  // that other runs on this machine could carry.
  const part = bystandersRun.slice(0, 23);
  const notes: Readonly<Record<string, (pid: number) => string>> = {
    "empty": () => "",
    "torn": () => `{"pid":1,"host":"${host}","run_id":"${part}`,
    "NULs": () => "\0".repeat(512),
    "a list": () => "[1]",
    "no run": () => JSON.stringify({ pid: 1, host }),
    "part of a run": () => JSON.stringify({ pid: 1, host, run_id: part }),
    "a run of the wrong type": () => JSON.stringify({ pid: 1, host, run_id: [part] }),
    "a run on another machine": () =>
      JSON.stringify({ pid: 1, host: `not-${host}`, run_id: bystandersRun }),
    "a recycled process": (pid) =>
      JSON.stringify({
        pid: 1,
        host,
        run_id: crypto.randomUUID(),
        harness_pgid: pid,
        harness_started: "1",
      }),
  };
  using scratch = makeQuickLoop({ phase: null });
  const bystander = new Deno.Command("sleep", {
    args: ["600"],
    env: { AUTOMATON_RUN_ID: bystandersRun },
  }).spawn();
  try {
    for (const [what, note] of Object.entries(notes)) {
      await t.step(what, async () => {
        writeFile(join(loopDir(scratch, LOOP), ".state.lock"), note(bystander.pid));
        const { json } = await tick(scratch);
        assertEquals([json.reason, json.warnings], ["no_current_task", []]);
        assert(isAlive(bystander.pid), "a process of somebody else was ended");
      });
    }
  } finally {
    if (isAlive(bystander.pid)) bystander.kill("SIGKILL");
    await bystander.status;
  }
});

// --- Paused ---

for (
  const [role, now, roles] of [
    ["implement", false, ["implement implement"]],
    ["implement", true, ["implement implement"]],
    ["verify", false, ["implement implement", "verify implement"]],
    ["verify", true, ["implement implement", "verify implement"]],
  ] as const
) {
  const flags = now ? ["--now"] : [];
  Deno.test(`--pause-loop ${flags} in ${role} ends the tick before its next role and changes nothing else`, async () => {
    using scratch = makeQuickLoop({ ...waitIn(role), orchestrate: "step code_review" });
    const before = readState(scratch);
    const child = startTick(scratch, ["--json"]);
    const agent = await findAgent(scratch);
    const pause = await runProgram(scratch, "status", [
      "--pause-loop",
      LOOP,
      ...flags,
      "--json",
    ]);
    assertEquals([pause.code, lastJson(pause).status], [0, "pausing"]);
    if (now) await awaitEnd(agent);
    else letGo(scratch);
    const result = await finish(child, PATIENCE.timeoutMs);
    const json = summaryOf(result);
    assertEquals([result.code, json.reason, json.skipped, json.ok], [0, "paused", true, true]);
    assertEquals(json.status, "paused");
    assertEquals(readState(scratch), { ...before, status: "paused" });
    assertEquals([readJournal(scratch), readPhase(scratch)], [roles, "implement"]);
    assert(!existsSync(join(loopDir(scratch, LOOP), "pause.request")));
    assertEquals(readLog(scratch, LOOP).filter(({ event }) => event === "PAUSED").length, 1);
    letGo(scratch);
    assertEquals((await tick(scratch)).json.reason, "paused");
    assertEquals(readJournal(scratch), [...roles]);
    await runProgram(scratch, "status", ["--resume-loop", LOOP]);
    const resumed = (await tick(scratch)).json;
    assertEquals([resumed.reason, resumed.iteration_count], [null, 1]);
  });
}

for (const text of ["", "{", "\0\0", "[]", '{"now": "yes"}']) {
  Deno.test(`a pause request that reads ${JSON.stringify(text)} pauses the loop`, async () => {
    using scratch = makeQuickLoop();
    writeFile(join(loopDir(scratch, LOOP), "pause.request"), text);
    assertEquals((await tick(scratch)).json.reason, "paused");
    assertEquals([readState(scratch).status, readJournal(scratch)], ["paused", []]);
  });
}

// --- Told to end ---

const EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;

for (const signal of ["SIGINT", "SIGTERM"] as const) {
  Deno.test(`${signal} in a tick ends all that it started, and saves nothing`, async () => {
    using scratch = makeQuickLoop({
      implement: `cd "$AUTOMATON_PROJECT/.."; [ -e go ] || ` +
        `{ setsid sleep 600 & echo $! >child; }; ${WAIT}`,
    });
    const before = readStateText(scratch);
    const child = startTick(scratch, ["--json"]);
    const agent = await findAgent(scratch);
    const grandchild = Number(Deno.readTextFileSync(join(scratch.dir, "child")));
    child.kill(signal);
    const result = await finish(child, PATIENCE.timeoutMs);
    assertEquals([result.code, result.signal], [EXIT_CODES[signal], null]);
    assert(!isAlive(agent) && !isAlive(grandchild));
    const json = summaryOf(result);
    assertEquals([json.ok, json.message], [false, `ended by ${signal}`]);
    assertEquals(readStateText(scratch), before);
    assertEquals(readJournal(scratch), ["implement implement"]);
    letGo(scratch);
    const next = (await tick(scratch)).json;
    assertEquals([next.reason, next.iteration_count, next.warnings], [null, 1, []]);
  });
}

Deno.test("SIGTERM before the first role starts none", async () => {
  using scratch = makeLoopScratch();
  const { stdout } = await run(scratch, ["sh", "-c", "command -v git"]);
  writeScript(
    join(scratch.bin, "git"),
    `#!/bin/sh
case " $* " in
  *" worktree add "*) : >"${scratch.dir}/at"; until [ -e "${scratch.dir}/go" ]; do sleep 0.05; done ;;
esac
exec ${stdout.trim()} "$@"
`,
  );
  const before = readStateText(scratch);
  const child = startTick(scratch, ["--json"]);
  await poll("git at work", () => existsSync(join(scratch.dir, "at")), PATIENCE);
  child.kill("SIGTERM");
  letGo(scratch);
  const result = await finish(child, PATIENCE.timeoutMs);
  assertEquals([result.code, summaryOf(result).ok], [143, false]);
  assertEquals([readStateText(scratch), readJournal(scratch)], [before, []]);
  assertEquals((await tick(scratch)).json.reason, null);
});

// --- Daemon ---

/** Starts ticks one after the other. */
function startDaemon(scratch: Scratch, ...args: readonly string[]): Deno.ChildProcess {
  const words = ["--mode", "daemon", "--loop", LOOP, "--json", ...args];
  return startProgram(scratch, "loop-runner", words, {
    env: { AUTOMATON_CONTEXT_TOKENS: "131072" },
  });
}

/** Asserts how a daemon ended, by its exit code, its answer and its last log line. */
function assertStopped(scratch: Scratch, result: Result, endedBy: string, ticks: number): Summary {
  assertEquals([result.code, result.signal], [0, null], result.stderr);
  const { schema_version, loop, ticks: counted, ended_by, last } = lastJson(result);
  assertEquals([schema_version, loop, counted, ended_by], [1, LOOP, ticks, endedBy]);
  const line = readLog(scratch, LOOP).at(-1);
  assertEquals([line?.event, line?.ended_by, line?.ticks], ["DAEMON_STOPPED", endedBy, ticks]);
  return last as Summary;
}

for (
  const [what, interval, args] of [
    ["its flag says", 3600, ["--interval", "1"]],
    ["its loop says", 1, []],
  ] as const
) {
  Deno.test(`a daemon ticks at the interval that ${what}, as often as --max-iterations says`, async () => {
    using scratch = makeQuickLoop({ config: { schedule: { interval_seconds: interval } } });
    const child = startDaemon(scratch, "--max-iterations", "2", ...args);
    const result = await finish(child, PATIENCE.timeoutMs);
    const last = assertStopped(scratch, result, "max_iterations", 2);
    assertEquals([last.tick, last.reason, readState(scratch).iteration_count], [2, null, 2]);
    const [first, second] = readLog(scratch, LOOP).filter(({ event }) => event === "TICK")
      .map(({ at }) => Date.parse(`${at}`));
    assert(second! - first! >= 1000, `${second! - first!} ms`);
    assertMatch(result.stderr, /night tick 1: fix-it passed.*\n(.*\n)*night tick 2: fix-it passed/);
  });
}

for (const signal of ["SIGINT", "SIGTERM"] as const) {
  Deno.test(`${signal} ends a daemon that sleeps`, async () => {
    using scratch = makeQuickLoop({ phase: null });
    const child = startDaemon(scratch, "--interval", "3600");
    await poll("first tick", () => readLog(scratch, LOOP).length > 0, PATIENCE);
    child.kill(signal);
    const last = assertStopped(scratch, await finish(child, PATIENCE.timeoutMs), signal, 1);
    assertEquals(last.reason, "no_current_task");
  });

  Deno.test(`${signal} ends a daemon in a tick once its harness is gone, and saves nothing`, async () => {
    using scratch = makeQuickLoop(waitIn("implement"));
    const before = readStateText(scratch);
    const child = startDaemon(scratch);
    const agent = await findAgent(scratch);
    child.kill(signal);
    const result = await finish(child, PATIENCE.timeoutMs);
    assert(!isAlive(agent));
    assertStopped(scratch, result, signal, 1);
    assertEquals([readStateText(scratch), readJournal(scratch)], [before, ["implement implement"]]);
  });
}

Deno.test("a daemon ends with its loop's completion", async (t) => {
  using scratch = makeQuickLoop({ phase: "bug_hunt" });
  for (const [what, reason] of [["that its tick brings", null], ["of earlier", "complete"]]) {
    await t.step(`${what}`, async () => {
      const result = await finish(startDaemon(scratch), PATIENCE.timeoutMs);
      const last = assertStopped(scratch, result, "complete", 1);
      assertEquals([last.status, last.reason], ["complete", reason]);
    });
  }
});

Deno.test("a daemon of a loop that stands still goes on, for a person may let it run again", async () => {
  using scratch = makeQuickLoop({ state: { status: "paused" } });
  const child = startDaemon(scratch, "--interval", "1");
  await poll("first skip", () => readLog(scratch, LOOP).length > 0, PATIENCE);
  const resumed = await runProgram(scratch, "status", ["--resume-loop", LOOP]);
  assertEquals(resumed.code, 0, resumed.stderr);
  await poll("tick", () => readState(scratch).iteration_count === 1, PATIENCE);
  child.kill("SIGTERM");
  assertEquals((await finish(child, PATIENCE.timeoutMs)).code, 0);
});

Deno.test("a daemon of an unknown loop says so and makes no folder for it", async () => {
  using scratch = makeQuickLoop();
  const child = startDaemon(scratch, "--loop", "nowhere", "--max-iterations", "1");
  const { code, stdout } = await finish(child, PATIENCE.timeoutMs);
  assertEquals([code, JSON.parse(stdout).last.reason], [0, "untracked"]);
  assert(!existsSync(loopDir(scratch, "nowhere")));
});

// --- Dry run ---

Deno.test("--dry-run changes nothing of a loop that is new, damaged or about to be paused", async (t) => {
  const cases: Readonly<Record<string, readonly [string, string]>> = {
    "new": ["", ""],
    "damaged": [".state.loop", '{"schema_version": 1'],
    "about to be paused": ["pause.request", "{}"],
  };
  for (const [what, [name, text]] of Object.entries(cases)) {
    await t.step(what, async () => {
      using scratch = makeLoopScratch();
      if (name !== "") writeFile(join(loopDir(scratch, LOOP), name), text);
      const before = snapshot(scratch.dir);
      const { code } = await tick(scratch, ["--dry-run"]);
      const after = snapshot(scratch.dir);
      const isPrompt = (path: string) => /\/outputs\/tick1-\w+-prompt\.md$/.test(path);
      const others = Object.entries(after).filter(([path]) => !isPrompt(path));
      assertEquals([code, Object.fromEntries(others)], [0, before]);
    });
  }
});

// --- Names and paths ---

for (
  const name of [
    "with  spaces",
    'quote\'s "double" `back`',
    "100%d $HOME ${x} $(touch pwned)",
    "-leading --dash",
    "größe 日本 é",
    "{prompt} {cwd} & ; | * ? [a] \\n #",
    ":colon:",
  ]
) {
  Deno.test(`a project in ${JSON.stringify(name)} works like any other`, async () => {
    using scratch = makeLoopScratch({ orchestrate: "step code_review" }, name);
    const odd = join(scratch.dir, `tmp ${basename(name)}`);
    Deno.mkdirSync(odd);
    const { json } = await tick(scratch, ["--project", `./${name}`], {
      cwd: scratch.dir,
      env: { TMPDIR: odd },
    });
    assertEquals([json.reason, json.warnings, json.next_phase], [null, [], "code_review"]);
    const worktree = worktreeOf(scratch);
    assertEquals(readState(scratch).worktree_path, worktree);
    assertEquals(git(scratch, worktree, "log", "-1", "--format=%s").slice(0, 12), "loop(night):");
    assertStringIncludes(
      Deno.readTextFileSync(outputOf(scratch, "tick1-implement.json")),
      "+worked",
    );
    const expected = ["bin", "home", "journal", name, "tmp", basename(odd)].sort();
    assertEquals([...Deno.readDirSync(scratch.dir)].map((entry) => entry.name).sort(), expected);
  });
}

Deno.test("a project whose name begins with a dash is named by --project=", async () => {
  using scratch = makeLoopScratch({ phase: null }, "-dash");
  const { json } = await tick(scratch, ["--project=-dash"], { cwd: scratch.dir });
  assertEquals(json.reason, "no_current_task");
});

Deno.test("the longest names of a loop and a task work", async () => {
  using scratch = makeScratch();
  makeLoop(scratch, { phase: null });
  const [loop, task] = ["0".repeat(63), "t".repeat(63)];
  writeTask(scratch, task, "implement", { loop });
  const config = readJson(join(loopDir(scratch, LOOP), "loop.json"));
  writeLoop(scratch, loop, { ...config, name: loop }, { current_task: task });
  const { json } = await tick(scratch, ["--loop", loop]);
  assertEquals([json.reason, json.task, json.next_phase], [null, task, "code_review"]);
  assertEquals(git(scratch, scratch.project, "branch", "--list", `loop/${loop}`).length, 70);
});

for (const inner of [".automaton", `.automaton/loops/${LOOP}`, `.automaton/tasks/${TASK}`]) {
  Deno.test(`${inner} may be a symbolic link`, async () => {
    using scratch = makeLoopScratch({ orchestrate: "step code_review" });
    const path = join(scratch.project, inner);
    const elsewhere = join(scratch.dir, "else where");
    Deno.renameSync(path, elsewhere);
    Deno.symlinkSync(elsewhere, path);
    const first = (await tick(scratch)).json;
    assertEquals([first.reason, first.next_phase, first.warnings], [null, "code_review", []]);
    assertEquals((await tick(scratch)).json.iteration_count, 2);
    assert(Deno.lstatSync(path).isSymlink);
  });
}

// --- Where not all can be written ---

/** Gives all of a scratch folder to the user that a tick is run as. */
async function giveAway(scratch: Scratch): Promise<void> {
  if (Deno.uid() !== 0) return;
  const { code, stderr } = await run(scratch, ["chown", "-R", "65534:65534", scratch.dir]);
  assertEquals(code, 0, stderr);
}

Deno.test("a project that may only be read skips the tick without a trace", async () => {
  using scratch = makeQuickLoop();
  const prefix = becomeNobody(scratch);
  for (const inner of [".", ".automaton", ".automaton/loops", `.automaton/loops/${LOOP}`]) {
    Deno.chmodSync(join(scratch.project, inner), 0o555);
  }
  const before = snapshot(scratch.dir);
  const { code, json } = await tick(scratch, [], { prefix });
  assertEquals([code, json.skipped, json.reason, json.ok], [0, true, "gate_failed", false]);
  assertMatch(json.message!, /[Pp]ermission denied.*\.state\.lock/);
  assertEquals(snapshot(scratch.dir), before);
});

Deno.test("what a tick cannot write is told, and costs no more than it must", async (t) => {
  const cases: readonly (readonly [
    what: string,
    path: string,
    mode: number,
    reason: string | null,
    words: RegExp,
  ])[] = [
    ["outputs", "outputs", 0o555, "gate_failed", /[Pp]ermission denied.*outputs/],
    ["the log", ".state.log", 0o444, null, /Cannot write the log in .*[Pp]ermission denied/],
    ["old outputs", "outputs/tick1-old", 0o555, null, /old outputs cannot be removed: .*denied/],
  ];
  for (const [what, path, mode, reason, words] of cases) {
    await t.step(what, async () => {
      using scratch = makeQuickLoop({
        config: { outputs: { retention: 1 } },
        state: { iteration_count: 5 },
      });
      const dir = loopDir(scratch, LOOP);
      writeFile(join(dir, "outputs/tick1-old/file"), "x");
      writeFile(join(dir, ".state.log"), "");
      const prefix = becomeNobody(scratch);
      await giveAway(scratch);
      Deno.chmodSync(join(dir, path), mode);
      const { code, json } = await tick(scratch, [], { prefix });
      assertEquals([code, json.reason], [0, reason], json.message ?? "");
      assertMatch(`${json.message} ${json.warnings.join()}`, words);
      assertEquals(readState(scratch).iteration_count, reason === null ? 6 : 5);
    });
  }
  await t.step("the repository", async () => {
    using scratch = makeLoopScratch();
    const prefix = becomeNobody(scratch);
    await giveAway(scratch);
    for (const inner of [".git/refs/heads", ".git/worktrees", ".git/refs", ".git"]) {
      const path = join(scratch.project, inner);
      if (existsSync(path)) Deno.chmodSync(path, 0o555);
    }
    const before = readStateText(scratch);
    const { code, json } = await tick(scratch, [], { prefix });
    assertEquals([code, json.reason, json.ok], [0, "worktree_failed", false], json.message ?? "");
    assertMatch(json.message!, /git worktree add: .*(denied|unable to create)/);
    assertEquals([readStateText(scratch), readJournal(scratch)], [before, []]);
  });
});

// --- Damaged files ---

/** What can be in a file's place; null for nothing that can be read as one. */
const DAMAGES: Readonly<Record<string, (path: string) => void>> = {
  "empty": (path) => writeFile(path, ""),
  "torn": (path) => writeFile(path, Deno.readTextFileSync(path).slice(0, 40)),
  "of NULs": (path) => writeFile(path, "\0".repeat(4096)),
  "a list": (path) => writeFile(path, "[]"),
  "a folder": (path) => {
    Deno.removeSync(path);
    Deno.mkdirSync(path);
  },
  "a pipe": (path) => {
    Deno.removeSync(path);
    assert(new Deno.Command("mkfifo", { args: [path] }).outputSync().success);
  },
  "a link to nothing": (path) => {
    Deno.removeSync(path);
    Deno.symlinkSync("/nowhere/at/all", path);
  },
  "wrong-typed": (path) =>
    writeFile(path, JSON.stringify({ ...readJson(path), name: LOOP, outputs: { retention: "2" } })),
};

for (const [damage, apply] of Object.entries(DAMAGES)) {
  Deno.test(`a loop.json that is ${damage} skips the tick and is named`, async () => {
    using scratch = makeQuickLoop();
    const path = join(loopDir(scratch, LOOP), "loop.json");
    apply(path);
    const before = readStateText(scratch);
    const { code, json } = await tick(scratch, [], { timeoutMs: 60_000 });
    assertEquals([code, json.skipped, json.reason], [0, true, "gate_failed"]);
    assertStringIncludes(json.message!, path);
    if (damage === "wrong-typed") {
      assertStringIncludes(json.message!, 'outputs.retention: found "2", wanted a whole number');
    }
    assertEquals([readStateText(scratch), readJournal(scratch)], [before, []]);
  });
}

Deno.test("a loop.json with comments, trailing commas and a byte order mark is read", async () => {
  using scratch = makeQuickLoop();
  const path = join(loopDir(scratch, LOOP), "loop.json");
  const text = Deno.readTextFileSync(path).trimEnd();
  writeFile(path, `\uFEFF// mine\r\n${text.slice(0, -1)}, /* end */\r\n}\r\n`);
  assertEquals((await tick(scratch)).json.reason, null);
});

for (const damage of ["a folder", "a pipe"]) {
  Deno.test(`a .state.loop that is ${damage} holds nobody up: it is kept, and the loop halts`, async () => {
    using scratch = makeQuickLoop();
    DAMAGES[damage]!(join(loopDir(scratch, LOOP), ".state.loop"));
    const { code, json } = await tick(scratch, [], { timeoutMs: 60_000 });
    assertEquals([code, json.skipped, json.reason], [0, true, "halted"], json.message ?? "");
    assertEquals([json.halt_reason, readJournal(scratch)], ["human_intervention", []]);
    assertEquals(readState(scratch).status, "halted");
    const kept = [...Deno.readDirSync(loopDir(scratch, LOOP))].filter(({ name }) =>
      name.startsWith(".state.loop.bad-")
    );
    assertEquals(kept.map(({ isFile }) => isFile), [false]);
  });
}

Deno.test("a .state.loop that is a link to nothing is none", async () => {
  using scratch = makeQuickLoop();
  const path = join(loopDir(scratch, LOOP), ".state.loop");
  DAMAGES["a link to nothing"]!(path);
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, readJournal(scratch)], [0, "untracked", []]);
  assert(Deno.lstatSync(path).isSymlink);
});

Deno.test("a models.json that is torn skips the tick and is named", async () => {
  using scratch = makeQuickLoop();
  writeFile(join(scratch.project, ".automaton/models.json"), '{"models": {');
  const { json } = await tick(scratch);
  assertEquals([json.reason, readJournal(scratch)], ["gate_failed", []]);
  assertMatch(json.message!, /Cannot parse ".*\.automaton\/models\.json"/);
});

Deno.test("a file where outputs/ belongs skips the tick and is named", async () => {
  using scratch = makeQuickLoop();
  writeFile(join(loopDir(scratch, LOOP), "outputs"), "x");
  const before = readStateText(scratch);
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, json.skipped], [0, "gate_failed", true]);
  assertStringIncludes(json.message!, "/outputs");
  assertEquals([readStateText(scratch), readJournal(scratch)], [before, []]);
});

Deno.test("a folder where the lock belongs skips the tick and is named", async () => {
  using scratch = makeQuickLoop();
  Deno.mkdirSync(join(loopDir(scratch, LOOP), ".state.lock"));
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, readJournal(scratch)], [0, "gate_failed", []]);
  assertStringIncludes(json.message!, ".state.lock");
});

// --- The oldest Deno ---

/** A Deno without FsFile.tryLock, where there is one on this machine. */
const OLD_DENO = Deno.env.get("AUTOMATON_TEST_OLD_DENO") || undefined;
const OLD = OLD_DENO === undefined ? " (AUTOMATON_TEST_OLD_DENO names none)" : "";

/** Starts a tick by the old Deno. */
function startOldTick(scratch: Scratch): Deno.ChildProcess {
  const script = join(ROOT, "scripts/loop-runner.ts");
  const words = ["run", "-q", "--no-prompt", "-P=loop-runner", script];
  const args = ["--mode=tick", `--loop=${LOOP}`, "--json"];
  return start(scratch, [OLD_DENO!, ...words, ...args], {
    env: { AUTOMATON_CONTEXT_TOKENS: "131072" },
  });
}

Deno.test(`of five ticks at once by the oldest Deno one runs${OLD}`, {
  ignore: OLD_DENO === undefined,
}, async () => {
  using scratch = makeQuickLoop(waitIn("implement"));
  let ended = 0;
  const ticks = Array.from({ length: 5 }, async () => {
    const result = await finish(startOldTick(scratch), PATIENCE.timeoutMs);
    ended++;
    return result;
  });
  await findAgent(scratch);
  await poll("end of four ticks", () => ended === 4, PATIENCE);
  letGo(scratch);
  const results = await Promise.all(ticks);
  assertEquals(results.map(({ code }) => code), Array(5).fill(0));
  const reasons = results.map((result) => summaryOf(result).reason).sort();
  assertEquals(reasons, [null, ...Array(4).fill("tick_in_progress")].sort());
  assertEquals(readState(scratch).iteration_count, 1);
});

Deno.test(`ticks and commands of two Denos respect each other's lock${OLD}`, {
  ignore: OLD_DENO === undefined,
}, async () => {
  using scratch = makeQuickLoop(waitIn("implement"));
  const old = startOldTick(scratch);
  await findAgent(scratch);
  assertEquals((await tick(scratch)).json.reason, "tick_in_progress");
  letGo(scratch);
  assertEquals(summaryOf(await finish(old, PATIENCE.timeoutMs)).iteration_count, 1);
  for (const name of ["go", "agent"]) Deno.removeSync(join(scratch.dir, name));
  writeTask(scratch, TASK, "implement", { loop: LOOP });
  const current = startTick(scratch, ["--json"]);
  await findAgent(scratch);
  const late = await finish(startOldTick(scratch), PATIENCE.timeoutMs);
  assertEquals([late.code, summaryOf(late).reason], [0, "tick_in_progress"]);
  letGo(scratch);
  assertEquals(summaryOf(await finish(current, PATIENCE.timeoutMs)).iteration_count, 2);
});

/** Ticks that meet each other, are killed, are told to end, are paused; and the daemon. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  git,
  isAlive,
  lastJson,
  loopDir,
  poll,
  readJson,
  readLog,
  type RunOptions,
  runProgram,
  type Scratch,
  snapshot,
  startProgram,
  writeFile,
  writeScript,
  writeTask,
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
  readState,
  readStateText,
  startTick,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";

/** Script of a role that tells its process and waits until the test makes the file "go". */
const HOLD =
  'echo $$ >"$AUTOMATON_PROJECT/pid.$AUTOMATON_ROLE"; wait_for "$AUTOMATON_PROJECT/go"; ';

/** Waits until a role of a running tick is at work and returns its process. */
function waitForRole(scratch: Scratch, role: string): Promise<number> {
  const path = join(scratch.project, `pid.${role}`);
  return poll(
    `role ${role} at work`,
    () =>
      existsSync(path) && Deno.readTextFileSync(path).endsWith("\n") &&
      Number(Deno.readTextFileSync(path)),
    {
      describe: () => `journal: ${readJournal(scratch)}`,
    },
  );
}

/** A loop one of whose roles holds still. */
function makeHeldScratch(role: "implement" | "verify" | "orchestrate"): Scratch {
  return makeLoopScratch({
    implement: `${role === "implement" ? HOLD : ""} echo x >>work.txt`,
    verify: `${role === "verify" ? HOLD : ""} verdict true 1`,
    orchestrate: `${role === "orchestrate" ? HOLD : ""} step code_review`,
  });
}

function letGo(scratch: Scratch): void {
  writeFile(join(scratch.project, "go"), "");
}

function status(scratch: Scratch, ...args: readonly string[]) {
  return runProgram(scratch, "status", args);
}

// --- Together ---

Deno.test("of two ticks at once one runs and the other skips", async () => {
  using scratch = makeHeldScratch("implement");
  const first = tick(scratch);
  await waitForRole(scratch, "implement");
  const second = await tick(scratch);
  assertEquals([second.code, second.json.reason], [0, "tick_in_progress"]);
  letGo(scratch);
  const { code, json } = await first;
  assertEquals([code, json.reason, json.iteration_count], [0, null, 1]);
});

Deno.test("of twenty ticks started at the same moment one runs and nineteen skip, all with exit code 0", async () => {
  using scratch = makeHeldScratch("implement");
  const ticks = Array.from({ length: 20 }, () => tick(scratch, [], { timeoutMs: 120_000 }));
  let ended = 0;
  for (const each of ticks) each.then(() => ended++, () => {});
  await poll("nineteen that skip", () => ended === 19, {
    timeoutMs: 120_000,
    describe: () => `${ended}`,
  });
  letGo(scratch);
  const results = await Promise.all(ticks);
  assertEquals(results.map(({ code }) => code), Array(20).fill(0));
  const reasons = results.map(({ json }) => json.reason).sort();
  assertEquals(reasons, [...Array(19).fill("tick_in_progress"), null].sort());
  assertEquals(readJournal(scratch).length, 3);
  assertEquals(readState(scratch).iteration_count, 1);
});

Deno.test("loops of one project tick beside each other", async () => {
  using scratch = makeHeldScratch("implement");
  writeTask(scratch, "other-task", "implement", { loop: "day" });
  const config = readJson(join(loopDir(scratch, LOOP), "loop.json"));
  writeFile(join(loopDir(scratch, "day"), "loop.json"), JSON.stringify({ ...config, name: "day" }));
  const state = { ...readState(scratch), name: "day", current_task: "other-task" };
  writeFile(join(loopDir(scratch, "day"), ".state.loop"), JSON.stringify(state));
  const args = ["--mode", "tick", "--loop", "day", "--json"];
  const env = { AUTOMATON_CONTEXT_TOKENS: "131072" };
  const both = [
    tick(scratch),
    finish(startProgram(scratch, "loop-runner", args, { env })),
  ] as const;
  await poll("both at work", () => readJournal(scratch).length === 2);
  letGo(scratch);
  const [night, day] = await Promise.all(both);
  assertEquals([night.json.reason, lastJson(day).reason], [null, null]);
  assertEquals([readPhase(scratch), readPhase(scratch, "other-task")], [
    "code_review",
    "code_review",
  ]);
});

// --- Killed ---

for (const role of ["implement", "verify", "orchestrate"] as const) {
  Deno.test(`a runner that is killed during ${role} leaves the state as it was, and the next tick sweeps`, async () => {
    using scratch = makeHeldScratch(role);
    await tick(scratch, ["--dry-run"]);
    const before = readStateText(scratch);
    const runner = startTick(scratch);
    const harness = await waitForRole(scratch, role);
    runner.kill("SIGKILL");
    await finish(runner);
    assertEquals(readStateText(scratch), before);
    assert(isAlive(harness), "the harness has a life of its own");
    letGo(scratch);
    // Held again if it were not swept: the file that lets it go is there, so wait for the sweep's word.
    const { code, json } = await tick(scratch);
    assertEquals([code, json.reason, json.tick], [0, null, 1], json.message ?? "");
    assert(!isAlive(harness));
    assertEquals([readState(scratch).iteration_count, readPhase(scratch)], [1, "code_review"]);
  });
}

Deno.test("the harness of a killed runner is ended, with what it has started", async () => {
  using scratch = makeLoopScratch({
    implement:
      `trap '' TERM; setsid sh -c 'trap "" TERM; echo $$ >"$AUTOMATON_PROJECT/pid.child"; sleep 300; sleep 300' & ${HOLD}`,
  });
  const runner = startTick(scratch);
  const [harness, child] = [
    await waitForRole(scratch, "implement"),
    await waitForRole(scratch, "child"),
  ];
  runner.kill("SIGKILL");
  await finish(runner);
  await status(scratch, "--pause-loop", LOOP);
  const { json } = await tick(scratch);
  assertEquals(json.reason, "paused");
  assertMatch(json.warnings.join(), /ended \d+ process\(es\) that an earlier tick left/);
  assertEquals([harness, child].filter(isAlive), []);
});

Deno.test("a process that has only the number of a killed runner's harness is left alone", async () => {
  using scratch = makeLoopScratch();
  const other = new Deno.Command("setsid", {
    args: ["sleep", "300"],
    stdin: "null",
    stdout: "null",
  }).spawn();
  try {
    const note = {
      pid: 1,
      host: Deno.hostname(),
      loop: LOOP,
      started_at: "2026-01-01T00:00:00Z",
      run_id: crypto.randomUUID(),
      harness_pgid: other.pid,
      harness_started: "1",
    };
    writeFile(join(loopDir(scratch, LOOP), ".state.lock"), JSON.stringify(note));
    const { json } = await tick(scratch);
    assertEquals([json.reason, json.warnings], [null, []]);
    assert(isAlive(other.pid));
  } finally {
    other.kill("SIGKILL");
    await other.status;
  }
});

Deno.test("a torn note in the lock file stops nothing", async () => {
  using scratch = makeLoopScratch();
  for (
    const text of [
      "",
      "{",
      "\0\0\0",
      "[]",
      '{"pid":"x"}',
      '{"pid":1,"run_id":7,"harness_pgid":"a"}',
    ]
  ) {
    writeFile(join(loopDir(scratch, LOOP), ".state.lock"), text);
    const { json } = await tick(scratch, ["--dry-run"]);
    assertEquals(json.reason, null, text);
  }
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("a runner that is killed after the step but before its save goes on from the next phase", async () => {
  using scratch = makeLoopScratch({ orchestrate: `step code_review; ${HOLD}` });
  const before = readState(scratch);
  const runner = startTick(scratch);
  await waitForRole(scratch, "orchestrate");
  assertEquals(readPhase(scratch), "code_review");
  runner.kill("SIGKILL");
  await finish(runner);
  assertEquals(readState(scratch), before);
  letGo(scratch);
  const path = join(loopDir(scratch, LOOP), "loop.json");
  writeFile(path, Deno.readTextFileSync(path).replace("step code_review", "step bug_hunt"));
  const { json } = await tick(scratch);
  assertEquals([json.tick, json.phase, json.next_phase], [1, "code_review", "bug_hunt"]);
});

Deno.test("a save that fails changes nothing, and the tick says so", async () => {
  using scratch = makeLoopScratch();
  const dir = loopDir(scratch, LOOP);
  await tick(scratch);
  const before = readStateText(scratch);
  // Folders stand where the runner, whatever its number, would write its temporary file.
  writeScript(
    join(scratch.bin, "git"),
    `#!/bin/sh
case "$*" in *write-tree*) (
  set --
  for process in /proc/[0-9]*; do set -- "$@" "${dir}/..state.loop.tmp-\${process#/proc/}"; done
  mkdir "$@" 2>/dev/null
) ;; esac
PATH=/usr/bin:/bin exec git "$@"
`,
  );
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, json.ok], [0, "gate_failed", false]);
  assertStringIncludes(json.message ?? "", "..state.loop.tmp-");
  assertEquals(readStateText(scratch), before);
});

// --- Told to end ---

for (const [signal, code] of [["SIGINT", 130], ["SIGTERM", 143]] as const) {
  Deno.test(`${signal} ends the harness, leaves the state as it was and gives exit code ${code}`, async () => {
    using scratch = makeLoopScratch({
      implement: `sh -c 'sleep 300; :' & echo $! >"$AUTOMATON_PROJECT/pid.child"; ${HOLD}`,
    });
    const before = readStateText(scratch);
    const runner = startTick(scratch, ["--json"]);
    const [harness, child] = [
      await waitForRole(scratch, "implement"),
      await waitForRole(scratch, "child"),
    ];
    runner.kill(signal);
    const result = await finish(runner);
    assertEquals(result.code, code);
    assertEquals([harness, child].filter(isAlive), []);
    const json = lastJson(result);
    assertEquals([json.ok, json.reason, json.message], [false, null, `ended by ${signal}`]);
    assertEquals(readStateText(scratch), before);
    assertEquals(readLog(scratch, LOOP).at(-1)?.event, "TICK_STOPPED");
    letGo(scratch);
    assertEquals((await tick(scratch)).json.iteration_count, 1);
  });
}

Deno.test("INT to a whole terminal, whose other programs it ends too, is no failure of theirs", async () => {
  using scratch = makeLoopScratch();
  writeScript(join(scratch.bin, "git"), '#!/bin/sh\necho $$ >>"$HOME/git"\nsleep 300\n');
  const runner = startTick(scratch, ["--json"], { prefix: ["setsid", "-w"] });
  const noted = join(scratch.home, "git");
  await poll("git at work", () => existsSync(noted) && Deno.readTextFileSync(noted).includes("\n"));
  const pid = Deno.readTextFileSync(noted).split("\n")[0];
  const group = Deno.readTextFileSync(`/proc/${pid}/stat`).split(" ")[4];
  Deno.kill(-Number(group), "SIGINT");
  const result = await finish(runner);
  assertEquals([result.code, lastJson(result).message], [130, "ended by SIGINT"], result.stderr);
  assertEquals(readState(scratch).iteration_count, 0);
});

// --- Paused ---

Deno.test("a pause during a tick is honoured before the next role, with nothing else changed", async () => {
  using scratch = makeHeldScratch("implement");
  const running = tick(scratch);
  await waitForRole(scratch, "implement");
  const before = readState(scratch);
  const { code } = await status(scratch, "--pause-loop", LOOP);
  assertEquals(code, 0);
  letGo(scratch);
  const { json } = await running;
  assertEquals([json.reason, json.status, json.ok], ["paused", "paused", true]);
  assertEquals(readState(scratch), { ...before, status: "paused" });
  assertEquals(readJournal(scratch), ["implement implement"]);
  assert(!existsSync(join(loopDir(scratch, LOOP), "pause.request")));
  assertEquals((await tick(scratch)).json.reason, "paused");
  assertEquals((await status(scratch, "--resume-loop", LOOP)).code, 0);
  assertEquals((await tick(scratch)).json.iteration_count, 1);
});

Deno.test("a pause is honoured before the built-in step too", async () => {
  using scratch = makeLoopScratch({ verify: `${HOLD} verdict true 1` });
  const running = tick(scratch);
  await waitForRole(scratch, "verify");
  await status(scratch, "--pause-loop", LOOP);
  letGo(scratch);
  assertEquals((await running).json.reason, "paused");
  assertEquals([readPhase(scratch), readState(scratch).iteration_count], ["implement", 0]);
});

Deno.test("a pause --now ends the harness that is at work", async () => {
  using scratch = makeHeldScratch("verify");
  const running = tick(scratch);
  const harness = await waitForRole(scratch, "verify");
  await status(scratch, "--pause-loop", LOOP, "--now");
  const { code, json } = await running;
  assertEquals([code, json.reason, json.status], [0, "paused", "paused"]);
  assert(!isAlive(harness));
  assertEquals(readState(scratch).iteration_count, 0);
});

Deno.test("a pause that is taken back in time has no effect", async () => {
  using scratch = makeHeldScratch("implement");
  const running = tick(scratch);
  await waitForRole(scratch, "implement");
  await status(scratch, "--pause-loop", LOOP);
  Deno.removeSync(join(loopDir(scratch, LOOP), "pause.request"));
  letGo(scratch);
  assertEquals((await running).json.iteration_count, 1);
});

// --- Daemon ---

/** Runs a daemon to its end. */
async function daemon(scratch: Scratch, args: readonly string[], options: RunOptions = {}) {
  return await finish(startDaemon(scratch, args, options), options.timeoutMs ?? 120_000);
}

function startDaemon(
  scratch: Scratch,
  args: readonly string[],
  options: RunOptions = {},
): Deno.ChildProcess {
  const env = { AUTOMATON_CONTEXT_TOKENS: "131072", ...options.env };
  return startProgram(scratch, "loop-runner", ["--mode", "daemon", "--loop", LOOP, ...args], {
    ...options,
    env,
  });
}

Deno.test("a daemon ends after so many ticks and says so", async () => {
  using scratch = makeLoopScratch({ verify: "verdict false 0.1" });
  const result = await daemon(scratch, ["--interval", "1", "--max-iterations", "2"]);
  assertEquals([result.code, readState(scratch).iteration_count], [0, 2]);
  assertEquals(result.stdout, `${LOOP}: daemon stopped after 2 tick(s) (max_iterations)\n`);
  assertMatch(result.stderr, /night tick 1: fix-it failed[^]*night tick 2: fix-it failed/);
  const last = readLog(scratch, LOOP).at(-1)!;
  assertEquals([last.event, last.ended_by, last.ticks], ["DAEMON_STOPPED", "max_iterations", 2]);
});

Deno.test("a daemon ends when the loop is complete, with --json in one line", async () => {
  using scratch = makeLoopScratch({ phase: "bug_hunt" });
  const result = await daemon(scratch, ["--interval", "1", "--json"]);
  const json = lastJson(result);
  assertEquals([result.code, json.schema_version, json.ticks, json.ended_by], [
    0,
    1,
    1,
    "complete",
  ]);
  assertEquals(result.stdout.trimEnd().split("\n").length, 1);
  assertEquals((json.last as Record<string, unknown>).status, "complete");
  assertEquals(readLog(scratch, LOOP).at(-1)?.event, "DAEMON_STOPPED");
});

for (const signal of ["SIGINT", "SIGTERM"] as const) {
  Deno.test(`${signal} ends a daemon at work: its harness first, exit code 0, a line in the log`, async () => {
    using scratch = makeHeldScratch("implement");
    const before = readStateText(scratch);
    const runner = startDaemon(scratch, ["--json"]);
    const harness = await waitForRole(scratch, "implement");
    runner.kill(signal);
    const result = await finish(runner);
    assertEquals([result.code, lastJson(result).ended_by], [0, signal], result.stderr);
    assert(!isAlive(harness));
    assertEquals(readStateText(scratch), before);
    const last = readLog(scratch, LOOP).at(-1)!;
    assertEquals([last.event, last.ended_by], ["DAEMON_STOPPED", signal]);
  });
}

Deno.test("TERM ends a daemon that sleeps at once", async () => {
  using scratch = makeLoopScratch({
    phase: null,
    config: { schedule: { interval_seconds: 86_400 } },
  });
  const runner = startDaemon(scratch, []);
  await poll("a tick that skips", () => readLog(scratch, LOOP).length > 0);
  runner.kill("SIGTERM");
  const { code, stderr } = await finish(runner);
  assertEquals(code, 0);
  assertStringIncludes(stderr, "no_current_task");
  assertEquals(readLog(scratch, LOOP).at(-1)?.event, "DAEMON_STOPPED");
});

Deno.test("a daemon goes on after a skip, a halt and a pause", async () => {
  using scratch = makeLoopScratch({ phase: null });
  const runner = startDaemon(scratch, ["--interval", "1"]);
  await poll("an idle tick", () => readLog(scratch, LOOP).length > 0);
  writeTask(scratch, TASK, "implement");
  assertEquals((await status(scratch, "--claim-loop-task", LOOP, "--task", TASK)).code, 0);
  await poll("a tick with work", () => readJournal(scratch).length > 0);
  assertEquals((await status(scratch, "--pause-loop", LOOP)).code, 0);
  await poll(
    "a tick that is paused",
    () => readLog(scratch, LOOP).some(({ reason }) => reason === "paused"),
  );
  runner.kill("SIGINT");
  assertEquals((await finish(runner)).code, 0);
});

// --- Folders that cannot be written ---

Deno.test({
  name: "a loop in a folder that may only be read is skipped, with what was found",
  ignore: Deno.uid() !== 0, // Somebody else has to own the folder.
  fn: async () => {
    using scratch = makeLoopScratch();
    const prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for (const path of [scratch.dir, scratch.home]) Deno.chmodSync(path, 0o755);
    Deno.chmodSync(join(scratch.dir, "tmp"), 0o777);
    const before = snapshot(loopDir(scratch, LOOP));
    const { code, json } = await tick(scratch, [], { prefix });
    assertEquals([code, json.reason, json.ok], [0, "gate_failed", false]);
    assertMatch(json.message ?? "", /denied|Permission|readonly|read-only/i);
    assertEquals(snapshot(loopDir(scratch, LOOP)), before);
  },
});

Deno.test("outputs that cannot be written skip the tick and leave the state as it was", async () => {
  using scratch = makeLoopScratch();
  writeFile(join(loopDir(scratch, LOOP), "outputs"), "a file in its place");
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, json.ok], [0, "gate_failed", false]);
  assertEquals([readState(scratch).iteration_count, readJournal(scratch)], [0, []]);
});

Deno.test("a log that cannot be written is a warning, never the end of a tick", async () => {
  using scratch = makeLoopScratch();
  Deno.mkdirSync(join(loopDir(scratch, LOOP), ".state.log"));
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.iteration_count], [null, 1], json.message ?? "");
  assertMatch(json.warnings.join(), /Cannot write the log/);
});

Deno.test("a person's checkout and a tick leave each other alone", async () => {
  using scratch = makeHeldScratch("implement");
  const running = tick(scratch);
  await waitForRole(scratch, "implement");
  git(scratch, scratch.project, "checkout", "-q", "-b", "mine");
  writeFile(join(scratch.project, "mine.txt"), "mine\n");
  git(scratch, scratch.project, "add", "mine.txt");
  git(scratch, scratch.project, "commit", "-q", "-m", "mine");
  letGo(scratch);
  const { json } = await running;
  assertEquals([json.reason, json.verdict?.pass], [null, true], json.message ?? "");
  assertMatch(json.warnings.join(), /own checkout changed/);
  assertEquals(git(scratch, scratch.project, "symbolic-ref", "--short", "HEAD"), "mine");
  assert(!existsSync(join(worktreeOf(scratch), "mine.txt")));
  assert(existsSync(outputOf(scratch, "tick1-verdict.json")));
});

/** More of what a tick lives through: a stubborn orphan, a failed save, a terminal's INT, a person at work. */
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
  runProgram,
  type Scratch,
  writeFile,
  writeScript,
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
  readState,
  startTick,
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

/** A loop whose Implement holds still. */
function makeHeldScratch(): Scratch {
  return makeLoopScratch({ implement: `${HOLD} echo x >>work.txt` });
}

function letGo(scratch: Scratch): void {
  writeFile(join(scratch.project, "go"), "");
}

function status(scratch: Scratch, ...args: readonly string[]) {
  return runProgram(scratch, "status", args);
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

Deno.test("a save that fails changes nothing but the count of failures, and the tick says so", async () => {
  using scratch = makeLoopScratch();
  const dir = loopDir(scratch, LOOP);
  await tick(scratch);
  const before = readState(scratch);
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
  assertEquals(readState(scratch), { ...before, consecutive_failures: 1 });
});

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

Deno.test("a pause is honoured before the built-in step too", async () => {
  using scratch = makeLoopScratch({ verify: `${HOLD} verdict true 1` });
  const running = tick(scratch);
  await waitForRole(scratch, "verify");
  await status(scratch, "--pause-loop", LOOP);
  letGo(scratch);
  assertEquals((await running).json.reason, "paused");
  assertEquals([readPhase(scratch), readState(scratch).iteration_count], ["implement", 0]);
});

Deno.test("a pause that is taken back in time has no effect", async () => {
  using scratch = makeHeldScratch();
  const running = tick(scratch);
  await waitForRole(scratch, "implement");
  await status(scratch, "--pause-loop", LOOP);
  Deno.removeSync(join(loopDir(scratch, LOOP), "pause.request"));
  letGo(scratch);
  assertEquals((await running).json.iteration_count, 1);
});

Deno.test("a person's checkout and a tick leave each other alone", async () => {
  using scratch = makeHeldScratch();
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

/**
 * Kill -9 at random moments of full ticks: of the runner, of status, of the harness, of all of them.
 * After each kill everything must still be whole, and the next tick must run as if nothing had been.
 */
import { assertEquals } from "@std/assert";
import { join } from "@std/path";
import {
  finish,
  git,
  lastJson,
  makeRepository,
  makeScratch,
  poll,
  readJson,
  runProgram,
  type Scratch,
  startProgram,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "../helpers.ts";
import {
  awaitNoneLiving,
  describeCheckout,
  IS_FULL,
  killNow,
  listHeldLocks,
  listLiving,
  listSetBacks,
  listTemporaries,
  Random,
  readMemory,
  runAll,
  Tally,
} from "./support.ts";

const TRIALS = IS_FULL ? 504 : 12;

/** The victims of a kill. */
const TARGETS = ["runner", "status", "harness", "harness group", "all"] as const;
type Target = typeof TARGETS[number];

/** One project that is hit again and again. */
interface Lane {
  readonly scratch: Scratch;
  readonly random: Random;
  readonly workSource: "single" | "audit" | "backlog";
  readonly hasWorktree: boolean;
  /** Orchestrate by a session of the harness; else by the runner itself. */
  readonly hasSession: boolean;
  loop: string;
  /** How long the last whole tick took: kills fall anywhere in it. */
  typicalMs: number;
}

/** Works like an agent, and notes each verdict that it gives where no program of ours writes. */
const AGENT = `#!/bin/sh
set -eu
role=$1 task=$2 phase=$3 task_dir=$4 output=$5 tick=$6 notes=$7
prompt=$(cat)
# What an agent's tools do: one child in a session of its own, one that holds the pipe open.
setsid sleep 600 >/dev/null 2>&1 &
sleep 600 &
last_line_of() {
  printf '%s\\n' "$prompt" | sed -n "$1" | tail -n 1
}
case $role in
  implement)
    printf '%s %s %s\\n' "$tick" "$task" "$phase" >>work.txt
    printf '{"done": "%s"}\\n' "$phase" >"$output"
    ;;
  verify)
    nonce=$(last_line_of 's/^"nonce": "\\(.*\\)"$/\\1/p')
    dice=$(printf '%s' "$nonce" | cksum | cut -d ' ' -f 1)
    pass=true
    [ $((dice % 4)) -ne 0 ] || pass=false
    printf '%s %s %s\\n' "$task" "$phase" "$pass" >>"$notes"
    printf '{"pass":%s,"score":0.%s,"reasons":["seen"],"next_hint":"go on","nonce":"%s"}\\n' \\
      "$pass" "$((dice % 10))" "$nonce"
    ;;
  orchestrate)
    printf '%s' "$prompt" | grep -q '"pass":true' || exit 0
    command=$(last_line_of 's/^    \\(.*\\) --transition PHASE .*/\\1/p')
    next=$(last_line_of "s/^- $phase -> \\([a-z_]*\\).*/\\1/p")
    eval "$command --transition $next --task $task --reason passed"
    ;;
esac
`;

function makeLane(number: number): Lane {
  const random = new Random(`kill ${number}`);
  const workSource = (["single", "audit", "backlog"] as const)[number % 3]!;
  const hasWorktree = Math.floor(number / 3) % 2 === 0;
  const hasSession = (number + Math.floor(number / 6)) % 2 === 0;
  const bare = makeScratch();
  const scratch = { ...bare, env: { ...bare.env, AUTOMATON_CONTEXT_TOKENS: "32000" } };
  const items = Array.from({ length: 400 }, (_, index) => `- [ ] **item ${index}** to be done\n`);
  makeRepository(scratch, scratch.project, {
    "README.md": "a project\n",
    "work.txt": "",
    ".gitignore": ".automaton/\n",
    "design/loops/BACKLOG.md": items.join(""),
  });
  writeScript(join(scratch.bin, "agent"), AGENT);
  const lane = {
    scratch,
    random,
    workSource,
    hasWorktree,
    hasSession,
    loop: "loop0",
    typicalMs: 1500,
  };
  writeFile(notesPath(lane), "");
  if (workSource === "audit") {
    for (let index = 0; index < 200; index++) {
      const name = `old-${index}`;
      writeTask(scratch, name, "implement", { updated_at: "2020-01-01T00:00:00Z" });
    }
  }
  supplyLoop(lane);
  return lane;
}

const notesPath = ({ scratch }: Lane): string => join(scratch.dir, "verdicts");
const statePath = (lane: Lane): string =>
  join(lane.scratch.project, ".automaton", "loops", lane.loop, ".state.loop");

/** Writes the lane's loop, and for a single work source the task that it starts with. */
function supplyLoop(lane: Lane): void {
  const { scratch, workSource, hasWorktree, hasSession, loop } = lane;
  const task = `task-of-${loop}`;
  if (workSource === "single") writeTask(scratch, task, "research", { loop });
  writeLoop(scratch, loop, {
    work_source: { kind: workSource },
    roles: { orchestrate: hasSession ? { prompt: "loop-orchestrate.md" } : null },
    brakes: { max_iterations: 100_000, score_plateau_window: 1000, max_consecutive_failures: 1000 },
    blast_radius: { worktree: hasWorktree, file_scope: ["work.txt"], commit: "always" },
    checks: [["test", "-e", "work.txt"]],
    harness: {
      command: [
        "agent",
        ..."{role} {current_task} {current_phase} {task_dir} {output} {tick}".split(" "),
        notesPath(lane),
      ],
      stdin: "prompt",
      timeout_seconds: 60,
    },
    outputs: { retention: 3 },
  }, workSource === "single" ? { current_task: task } : {});
}

/** Plays the person: approves what waits, and gives a single loop its next task. */
async function supplyWork(lane: Lane): Promise<void> {
  const { scratch, random } = lane;
  const status = async (...args: string[]) => {
    const { code, stderr } = await runProgram(scratch, "status", args);
    if (code !== 0) throw new Error(`status ${args.join(" ")}: ${stderr}`);
  };
  const { loops, tasks } = readMemory(scratch);
  const waiting = [...tasks.values()].filter(({ phase }) => phase === "human_intervention");
  const isIdle = loops.get(lane.loop)?.current_task === null;
  const isSingle = lane.workSource === "single";
  if (waiting.length > 0 && (isSingle || random.below(3) === 0)) {
    await status("--approve", "--task", waiting[0]!.name);
    if (isSingle) await status("--claim-loop-task", lane.loop, "--task", waiting[0]!.name);
  } else if (isSingle && isIdle) {
    lane.loop = `loop${Number(lane.loop.slice(4)) + 1}`;
    supplyLoop(lane);
  }
}

/** Chooses whom a target means at this moment; null while there is none. */
function findVictims(lane: Lane, runner: number, target: Target): number[] | null {
  if (target === "runner") return [runner];
  const living = listLiving(lane.scratch);
  if (target === "all") return lane.random.shuffle(living.map(({ pid }) => pid));
  const isMeant = ({ command }: { command: string }) =>
    target === "status"
      ? command.includes("scripts/status.ts")
      : /\/agent (implement|verify|orchestrate)/.test(command) ||
        (target === "harness group" && command.startsWith("sleep"));
  const victims = living.filter(isMeant).map(({ pid }) => pid);
  return victims.length === 0 ? null : victims;
}

/** One kill and the tick after it. */
async function hit(lane: Lane, target: Target, tally: Tally): Promise<void> {
  const { scratch, random } = lane;
  if (lane.hasWorktree && random.below(4) === 0) dropWorktree(lane);
  const before = readMemory(scratch);
  const checkout = lane.hasWorktree ? describeCheckout(scratch) : "";
  const momentMs = random.next() * 1.1 * lane.typicalMs;
  const where = `${target} of ${lane.workSource}/${lane.hasWorktree ? "worktree" : "project"}/${
    lane.hasSession ? "session" : "built in"
  } killed after ${Math.round(momentMs)} of ${Math.round(lane.typicalMs)} ms`;
  const lose = (loss: Parameters<Tally["lose"]>[0], what: string) =>
    tally.lose(loss, `${where}: ${what}`);

  const child = startProgram(scratch, "loop-runner", tickArgs(lane));
  let hasEnded = false;
  const ending = finish(child, 60_000).finally(() => hasEnded = true);
  await Promise.race([ending, new Promise((wake) => setTimeout(wake, momentMs))]);
  const victims = await poll(
    "victim",
    () => hasEnded ? [] : findVictims(lane, child.pid, target),
    { timeoutMs: 60_000 },
  );
  victims.forEach(killNow);
  tally.tried++;
  const atOnce = readMemory(scratch);
  const killed = await ending;
  if (killed.signal !== "SIGKILL" && killed.code !== 0) {
    lose("other", `the tick ended with exit code ${killed.code}: ${killed.stderr}`);
  }
  for (const problem of listSetBacks(before, atOnce)) lose("states lost", problem);
  const afterKill = readMemory(scratch);
  for (const problem of listSetBacks(atOnce, afterKill)) lose("states lost", problem);
  const held = await poll("free lock", () => listHeldLocks(scratch).length === 0 ? [] : null)
    .catch(() => listHeldLocks(scratch));
  held.forEach((path) => lose("stuck locks", path));

  const startedAt = performance.now();
  const next = lastJson(await runProgram(scratch, "loop-runner", tickArgs(lane)));
  const isWhole = next.skipped === false && next.verdict !== null;
  if (isWhole) lane.typicalMs = (lane.typicalMs + performance.now() - startedAt) / 2;
  else if (!isUsedUp(lane)) {
    // What halts a loop halts it for good: the lane goes on with a new project.
    throw new Error(`${where}: the next tick did not run: ${next.reason}: ${next.message}`);
  }
  const after = readMemory(scratch);
  for (const problem of listSetBacks(afterKill, after)) lose("states lost", problem);
  const ticks = after.loops.get(lane.loop)!.iteration_count -
    afterKill.loops.get(lane.loop)!.iteration_count;
  if (ticks !== Number(isWhole)) lose("states lost", `the next tick counted ${ticks}`);
  const left = await awaitNoneLiving(scratch);
  left.forEach(({ pid, command }) => (lose("processes left", command), killNow(pid)));
  listTemporaries(scratch, lane.loop).forEach((name) => lose("other", `${name} was left behind`));
  listWrongPasses(lane).forEach((step) => lose("wrong passes", step));
  if (lane.hasWorktree && describeCheckout(scratch) !== checkout) {
    lose("other", `the checkout changed:\n${checkout}\n---\n${describeCheckout(scratch)}`);
  }
  await supplyWork(lane);
}

const tickArgs = (lane: Lane): string[] => ["--mode=tick", `--loop=${lane.loop}`, "--json"];

/** True where the killed tick came so far that it left the loop without work. */
function isUsedUp(lane: Lane): boolean {
  const state = readJson(statePath(lane));
  return lane.workSource === "single" && state.current_task === null ||
    state.status === "complete";
}

function dropWorktree(lane: Lane): void {
  const path = join(lane.scratch.project, ".automaton", "loops", lane.loop, "worktree");
  try {
    git(lane.scratch, lane.scratch.project, "worktree", "remove", "--force", "--force", path);
  } catch {
    // There is none yet.
  }
}

/** Forward steps that a loop took without as many passes by the verifier for that task and phase. */
function listWrongPasses(lane: Lane): string[] {
  const notes = Deno.readTextFileSync(notesPath(lane)).split("\n");
  const wrong: string[] = [];
  for (const { name, history } of readMemory(lane.scratch).tasks.values()) {
    const steps = history.filter(({ by, from }) => by.startsWith("loop:") && from !== null);
    for (const phase of new Set(steps.map(({ from }) => from))) {
      const taken = steps.filter(({ from }) => from === phase).length;
      const passed = notes.filter((note) => note === `${name} ${phase} true`).length;
      if (taken > passed) wrong.push(`${name} left ${phase} ${taken} times, ${passed} passed`);
    }
  }
  return wrong;
}

Deno.test("a loop goes on when its tick was killed between the last step of a task and its save", async (t) => {
  const step = { at: "2026-01-01T00:00:00Z", from: "bug_hunt", to: "complete", reason: null };
  for (
    const [kind, phase, by, reason, status] of [
      ["single", "complete", "loop:night", "complete", "complete"],
      ["single", "complete", "loop:night/orchestrate", "complete", "complete"],
      ["single", "human_intervention", "loop:night", "no_current_task", "running"],
      ["backlog", "complete", "loop:night", "no_work", "running"],
      ["backlog", "complete", "person", "halted", "halted"],
      ["backlog", "complete", "loop:nights", "halted", "halted"],
    ] as const
  ) {
    await t.step(`${kind}, ${phase} by ${by}: ${reason}`, async () => {
      using scratch = makeScratch();
      writeTask(scratch, "a", phase, { history: [{ ...step, to: phase, by }] });
      const dir = writeLoop(
        scratch,
        "night",
        { work_source: { kind, area: "none" } },
        { current_task: "a", iteration_count: 3 },
      );
      const args = ["--mode=tick", "--loop=night", "--json"];
      const summary = lastJson(await runProgram(scratch, "loop-runner", args));
      assertEquals(summary.reason, reason, `${summary.message}`);
      const state = readJson(join(dir, ".state.loop"));
      assertEquals([state.status, state.iteration_count], [status, 3]);
      assertEquals(state.current_task, status === "halted" ? "a" : null);
    });
  }
});

Deno.test({
  name: `kill -9 at ${TRIALS} moments of full ticks loses nothing`,
  ignore: Deno.build.os !== "linux", // Processes are found by /proc.
  fn: async () => {
    const tally = new Tally("kill -9");
    const laneCount = Math.min(12, TRIALS);
    const jobs = Array.from({ length: laneCount }, (_, number) => async () => {
      let lane = makeLane(number);
      const targets = lane.random.shuffle(TARGETS);
      for (let trial = 0; trial < TRIALS / laneCount; trial++) {
        try {
          await hit(lane, targets[(number + trial) % targets.length]!, tally);
        } catch (error) {
          tally.lose("other", `${(error as Error).message} (lane ${number}, trial ${trial})`);
          listLiving(lane.scratch).forEach(({ pid }) => killNow(pid));
          lane.scratch[Symbol.dispose]();
          lane = makeLane(number);
        }
      }
      lane.scratch[Symbol.dispose]();
    });
    await runAll(jobs, Math.max(2, navigator.hardwareConcurrency));
    tally.close();
  },
});

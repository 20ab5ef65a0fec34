/**
 * Kill -9 at random moments of full ticks: of the runner, of what it started, of all of them; now and then
 * also of the tick after that, and of a command that a person runs. After each kill everything must still
 * be whole, and the next tick must run as if nothing had been.
 */
import { assertEquals } from "@std/assert";
import { join } from "@std/path";
import {
  finish,
  git,
  lastJson,
  loopDir,
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
import type { TaskState } from "../../scripts/status.ts";
import {
  awaitNoneLiving,
  describeCheckout,
  HALF_WRITTEN,
  IS_FULL,
  killNow,
  listFiles,
  listHeldLocks,
  listLiving,
  listSetBacks,
  listTemporaries,
  type Memory,
  Random,
  readMemory,
  runAll,
  Tally,
} from "./support.ts";

const TRIALS = IS_FULL ? 504 : 12;

/** The victims of a kill. */
const TARGETS = [
  "runner",
  "runner in a session",
  "status",
  "harness",
  "harness group",
  "check",
  "git",
  "all",
] as const;
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
  /** How many kills of the runner fell into a session. */
  readonly hits: { inSession: number };
}

/** Notes what went wrong in one trial. */
type Lose = (loss: Parameters<Tally["lose"]>[0], what: string) => void;

/**
 * Works like an agent, and notes each verdict that it gives, with the time, where no program of ours writes.
 * Costs a dollar a session. Takes its time while there is a file beside the notes.
 */
const AGENT = `#!/bin/sh
set -eu
role=$1 task=$2 phase=$3 task_dir=$4 output=$5 tick=$6 notes=$7
prompt=$(cat)
# What an agent's tools do: one child in a session of its own, one that holds the pipe open.
setsid sleep 600 >/dev/null 2>&1 &
sleep 600 &
if [ -s "$notes.slow" ]; then
  dice=$(printf '%s %s' "$(cat "$notes.slow")" "$role" | cksum | cut -d ' ' -f 1)
  sleep "0.$((dice % 7))"
fi
echo '{"cost": 1}'
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
    printf '%s %s %s %s %s\\n' "$(date +%s%3N)" "$tick" "$task" "$phase" "$pass" >>"$notes"
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

/** Takes long enough to be met. */
const CHECK = `#!/bin/sh
sleep 0.05
test -e work.txt
`;

function makeLane(number: number, hits: Lane["hits"]): Lane {
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
  writeScript(join(scratch.bin, "check-work"), CHECK);
  const lane = {
    scratch,
    random,
    workSource,
    hasWorktree,
    hasSession,
    loop: "loop0",
    typicalMs: 1500,
    hits,
  };
  writeFile(notesPath(lane), "");
  if (workSource === "audit") {
    for (let index = 0; index < 200; index++) {
      const name = `old-${index}`;
      writeTask(scratch, name, "implement", { updated_at: "2020-01-01T00:00:00Z" });
    }
  }
  // An audit would work on it.
  if (workSource !== "audit") writeTask(scratch, BY_HAND, "research", { claimed_by: "me" });
  supplyLoop(lane);
  return lane;
}

/** The task that a person works on. */
const BY_HAND = "by-hand";

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
    checks: [["check-work"]],
    harness: {
      command: [
        "agent",
        ..."{role} {current_task} {current_phase} {task_dir} {output} {tick}".split(" "),
        notesPath(lane),
      ],
      stdin: "prompt",
      usage: { combine: "sum", cost_usd: "cost" },
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
  const waiting = [...tasks.values()].filter(({ name, phase }) =>
    phase === "human_intervention" && name !== BY_HAND
  );
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

const isAgent = ({ command }: { command: string }): boolean =>
  /\/agent (implement|verify|orchestrate)/.test(command);

/** Whom a target means, by their command lines. */
const IS_MEANT: Readonly<Record<string, (living: { command: string }) => boolean>> = {
  status: ({ command }) => command.includes("scripts/status.ts"),
  harness: isAgent,
  "harness group": (living) => isAgent(living) || living.command.startsWith("sleep"),
  check: ({ command }) => command.endsWith("check-work"),
  git: ({ command }) => /^(\S*\/)?git /.test(command),
};

/** Chooses whom a target means at this moment; null while there is none. */
function findVictims(lane: Lane, runner: number, target: Target): number[] | null {
  if (target === "runner") return [runner];
  const living = listLiving(lane.scratch);
  if (target === "runner in a session") return living.some(isAgent) ? [runner] : null;
  if (target === "all") return lane.random.shuffle(living.map(({ pid }) => pid));
  const victims = living.filter(IS_MEANT[target]!).map(({ pid }) => pid);
  return victims.length === 0 ? null : victims;
}

/** Runs a tick and kills its victims at a moment; returns what is remembered after it. */
async function killTick(lane: Lane, target: Target, momentMs: number, lose: Lose): Promise<Memory> {
  const { scratch } = lane;
  const [before, costs] = [readMemory(scratch), readCosts(lane, lose)];
  const child = startProgram(scratch, "loop-runner", tickArgs(lane));
  let hasEnded = false;
  const ending = finish(child, 60_000).finally(() => hasEnded = true);
  await Promise.race([ending, new Promise((wake) => setTimeout(wake, momentMs))]);
  let victims: number[] | null = null;
  while (!hasEnded && victims === null) {
    victims = findVictims(lane, child.pid, target);
    // Some live for a few milliseconds only.
    if (victims === null) await new Promise((wake) => setTimeout(wake, 2));
  }
  const isInSession = victims?.includes(child.pid) && listLiving(scratch).some(isAgent);
  victims?.forEach(killNow);
  const atOnce = readMemory(scratch);
  const killed = await ending;
  if (isInSession && killed.signal === "SIGKILL") lane.hits.inSession++;
  if (killed.signal !== "SIGKILL" && killed.code !== 0) {
    lose("other", `the tick ended with exit code ${killed.code}: ${killed.stderr}`);
  }
  for (const problem of listSetBacks(before, atOnce)) lose("states lost", problem);
  const after = readMemory(scratch);
  for (const problem of listSetBacks(atOnce, after)) lose("states lost", problem);
  compareCosts(costs, readCosts(lane, lose), lose);
  await awaitFreeLocks(scratch, lose);
  return after;
}

async function awaitFreeLocks(scratch: Scratch, lose: Lose): Promise<void> {
  const held = await poll("free lock", () => listHeldLocks(scratch).length === 0 ? [] : null)
    .catch(() => listHeldLocks(scratch));
  held.forEach((path) => lose("stuck locks", path));
}

/** What each loop has spent; a file that cannot be read is lost. */
function readCosts({ scratch }: Lane, lose: Lose): Map<string, number> {
  const costs = new Map<string, number>();
  for (const path of listFiles(join(scratch.project, ".automaton", "loops"))) {
    if (!path.endsWith("/cost.json")) continue;
    try {
      costs.set(path, Number(readJson(path).total_usd));
    } catch (error) {
      lose("states lost", `${path}: ${error}`);
    }
  }
  return costs;
}

function compareCosts(
  before: ReadonlyMap<string, number>,
  after: ReadonlyMap<string, number>,
  lose: Lose,
): void {
  for (const [path, spent] of before) {
    if ((after.get(path) ?? 0) < spent) {
      lose("states lost", `${path} went from ${spent} to ${after.get(path)}`);
    }
  }
}

/** Kills a command that a person runs, and runs it again: it is done, or was done. */
async function killCommand(lane: Lane, lose: Lose): Promise<void> {
  const { scratch, random, loop } = lane;
  const pause = [`--pause-loop=${loop}`];
  const task = `--task=${BY_HAND}`;
  const commands = lane.workSource === "audit" ? [pause] : [
    pause,
    ["--claim", task, "--session=me"],
    ["--release", task],
    ["--transition=human_intervention", task, "--reason=a question"],
    ["--approve", task],
    ["--approve", task],
  ];
  const command = random.pick(commands);
  const before = readMemory(scratch);
  const child = startProgram(scratch, "status", command);
  const momentMs = random.next() * lane.typicalMs / 5;
  const ending = finish(child, 60_000);
  await Promise.race([ending, new Promise((wake) => setTimeout(wake, momentMs))]);
  killNow(child.pid);
  await ending;
  const told = (what: string) => `${command.join(" ")} killed after ${momentMs} ms: ${what}`;
  for (const problem of listSetBacks(before, readMemory(scratch))) {
    lose("states lost", told(problem));
  }
  await awaitFreeLocks(scratch, lose);
  const again = await runProgram(scratch, "status", command);
  const isDone = /(it is there already|it waits for a person|nothing to approve|does not tick)$/m;
  if (again.code !== 0 && !isDone.test(again.stderr)) lose("other", told(again.stderr));
  for (const problem of listSetBacks(before, readMemory(scratch))) {
    lose("states lost", told(problem));
  }
  if (command !== pause || readJson(statePath(lane)).status === "complete") return;
  const resumed = await runProgram(scratch, "status", [`--resume-loop=${loop}`]);
  if (resumed.code !== 0) lose("other", told(resumed.stderr));
}

/**
 * Makes half-written files as old as the next tick clears away; a new one may be somebody's at work. Adds
 * one, since few kills meet a save.
 */
function ageTemporaries({ scratch, loop }: Lane): void {
  const dir = loopDir(scratch, loop);
  writeFile(join(dir, ".cost.json.tmp-1"), "{");
  for (const { name } of Deno.readDirSync(dir)) {
    if (HALF_WRITTEN.test(name)) Deno.utimeSync(join(dir, name), 0, 0);
  }
}

/** One kill or two, and the tick after it. */
async function hit(lane: Lane, target: Target, tally: Tally): Promise<void> {
  const { scratch, random } = lane;
  if (lane.hasWorktree && random.below(4) === 0) dropWorktree(lane);
  const checkout = lane.hasWorktree ? describeCheckout(scratch) : "";
  const isSlow = target === "runner in a session" || random.below(3) === 0;
  const longMs = lane.typicalMs + (isSlow ? 900 : 0);
  // Whoever is waited for comes by himself.
  const momentMs = random.next() * (target === "runner" || target === "all" ? 1.1 : 0.7) * longMs;
  const where = `${target} of ${lane.workSource}/${lane.hasWorktree ? "worktree" : "project"}/${
    lane.hasSession ? "session" : "built in"
  } killed after ${Math.round(momentMs)} of ${Math.round(longMs)} ms`;
  const lose: Lose = (loss, what) => tally.lose(loss, `${where}: ${what}`);

  tally.tried++;
  if (isSlow) writeFile(`${notesPath(lane)}.slow`, `${random.below(1e6)}`);
  let afterKill = await killTick(lane, target, momentMs, lose);
  if (isSlow) Deno.removeSync(`${notesPath(lane)}.slow`);
  if (random.below(4) === 0) {
    // What clears up after a kill is killed as well.
    const [again, againMs] = [random.pick(["runner", "all"] as const), random.next() * longMs];
    afterKill = await killTick(lane, again, againMs, lose);
  }
  if (random.below(4) === 0) {
    await killCommand(lane, lose);
    afterKill = readMemory(scratch);
  }
  ageTemporaries(lane);
  const costs = readCosts(lane, lose);

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
  const path = join(loopDir(scratch, lane.loop), "cost.json");
  const spent = readCosts(lane, lose);
  compareCosts(costs, spent, lose);
  // Its implementer and its verifier at least.
  if (isWhole && (spent.get(path) ?? 0) < (costs.get(path) ?? 0) + 2) {
    lose("states lost", `the next tick cost nothing: ${costs.get(path)} to ${spent.get(path)}`);
  }
  const left = await awaitNoneLiving(scratch);
  left.forEach(({ pid, command }) => (lose("processes left", command), killNow(pid)));
  listTemporaries(scratch, lane.loop).forEach((name) => lose("other", `${name} was left behind`));
  const notes = Deno.readTextFileSync(notesPath(lane));
  listWrongPasses(notes, after.tasks.values()).forEach((step) => lose("wrong passes", step));
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

/**
 * Steps that a loop took although the last verdict on that task in that phase, since it came there, was no
 * pass.
 *
 * @param notes What the verifiers wrote down, a line each: time, tick, task, phase, pass.
 */
function listWrongPasses(
  notes: string,
  tasks: Iterable<Pick<TaskState, "name" | "history">>,
): string[] {
  const verdicts = notes.trimEnd().split("\n").map((line) => {
    const [at, tick, task, phase, pass] = line.split(" ");
    return { at: Number(at), tick, task, phase, isPass: pass === "true" };
  });
  const wrong: string[] = [];
  for (const { name, history } of tasks) {
    for (const [index, { at, by, from }] of history.entries()) {
      if (!by.startsWith("loop:") || from === null) continue;
      const [cameAt, leftAt] = [Date.parse(history[index - 1]!.at), Date.parse(at)];
      const last = verdicts.findLast((verdict) =>
        verdict.task === name && verdict.phase === from && verdict.at <= leftAt
      );
      if (last?.isPass && last.at >= cameAt) continue;
      wrong.push(`${name} left ${from} at ${leftAt}, the last verdict was ${JSON.stringify(last)}`);
    }
  }
  return wrong;
}

Deno.test("a step without a pass right before it is noticed, whatever was passed earlier", () => {
  const step = (at: number, from: string | null, to: string, by = "loop:night") => ({
    at: new Date(at).toISOString(),
    from,
    to,
    by,
    reason: null,
  });
  const history = [step(0, null, "implement", "person"), step(50, "implement", "code_review")];
  const back = [
    step(60, "code_review", "implement", "person"),
    step(90, "implement", "code_review"),
  ];
  const count = (steps: typeof history, ...notes: string[]) =>
    listWrongPasses(notes.join("\n"), [{ name: "a", history: steps }]).length;
  const [pass, fail] = ["10 1 a implement true", "20 1 a implement false"];
  const again = "70 2 a implement true";
  assertEquals(
    [
      count(history, pass),
      count(history, fail, "30 1 a implement true"),
      count([...history, ...back], pass, again),
      count(history.slice(0, 1)),
      count(history),
      count(history, fail),
      count(history, pass, fail),
      count(history, "10 1 b implement true", "10 1 a design true"),
      count(history, again),
      count([...history, ...back], pass),
    ],
    [0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
  );
});

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
    const targets = new Random("kill targets").shuffle(TARGETS);
    const hits = { inSession: 0 };
    const jobs = Array.from({ length: laneCount }, (_, number) => async () => {
      let lane = makeLane(number, hits);
      for (let trial = 0; trial < TRIALS / laneCount; trial++) {
        try {
          await hit(lane, targets[(number + trial) % targets.length]!, tally);
        } catch (error) {
          tally.lose("other", `${(error as Error).message} (lane ${number}, trial ${trial})`);
          listLiving(lane.scratch).forEach(({ pid }) => killNow(pid));
          lane.scratch[Symbol.dispose]();
          lane = makeLane(number, hits);
        }
      }
      lane.scratch[Symbol.dispose]();
    });
    await runAll(jobs, Math.max(2, navigator.hardwareConcurrency));
    if (hits.inSession === 0) tally.lose("other", "no kill of the runner fell into a session");
    tally.close();
  },
});

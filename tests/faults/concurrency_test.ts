/**
 * Many people, ticks and audits on one project at the same time. Whatever each of them saw and was told
 * must be what some order of their calls, one after the other, could have given.
 */
import { join } from "@std/path";
import { finish, lastJson, loopDir, readLog, type Scratch, writeTask } from "../helpers.ts";
import { startProgram } from "../helpers.ts";
import { LOOP, makeLoopScratch } from "../runner_support.ts";
import { parseLoopState } from "../../scripts/status.ts";
import { awaitNoneLiving, IS_FULL, listHeldLocks, Random, readMemory, Tally } from "./support.ts";

const WIDTH = IS_FULL ? 50 : 16;
const DURATION_MS = IS_FULL ? 60_000 : 6000;
const TASKS = ["a", "b", "c"];

/** What a loop is to somebody who looks: all that its brakes depend on. */
type View = string;

const viewOf = (
  state: {
    status: string;
    halt_reason: string | null;
    iteration_count: number;
    resumed_count: number;
  },
): View => [state.status, state.halt_reason, state.iteration_count, state.resumed_count].join(" ");

/** One call of a program, from outside. */
interface Call {
  readonly words: readonly string[];
  readonly startedAt: number;
  readonly endedAt: number;
  readonly code: number;
  readonly json: Record<string, unknown>;
}

/** Calls that change a loop and take no time. */
const QUICK = [
  ["status", `--pause-loop=${LOOP}`],
  ["status", `--resume-loop=${LOOP}`],
  ["status", "--approve", `--loop=${LOOP}`],
  ["status", `--halt-loop=${LOOP}`, "--reason=human_intervention"],
  ["status", `--can-continue=${LOOP}`],
] as const;

function chooseCall(random: Random): readonly string[] {
  const task = random.pick(TASKS);
  // A tick holds the lock for long; most of the time it is the others who meet.
  if (random.below(3) > 0) return random.pick(QUICK);
  return random.pick([
    ["loop-runner", "--mode=tick", `--loop=${LOOP}`],
    ["status", `--pause-loop=${LOOP}`],
    ["status", `--resume-loop=${LOOP}`],
    ["status", `--resume-loop=${LOOP}`],
    ["status", "--approve", `--loop=${LOOP}`],
    ["status", "--approve", `--loop=${LOOP}`],
    ["status", `--halt-loop=${LOOP}`, "--reason=human_intervention"],
    ["status", `--check-gate=${LOOP}`],
    ["status", `--can-continue=${LOOP}`],
    ["status", `--can-continue=${LOOP}`],
    ["status", "--audit"],
    ["status", "--claim", `--task=${task}`, `--session=${random.pick(["x", "y"])}`],
    ["status", "--release", `--task=${task}`],
    ["status", "--approve", `--task=${task}`],
    ["status", `--transition=${random.pick(["design", "spec", "implement"])}`, `--task=${task}`],
    ["status", "--transition=human_intervention", `--task=${task}`, "--reason=a question"],
    ["status", "--transition=research", `--task=${task}`, "--reason=again"],
  ]);
}

async function makeCall(scratch: Scratch, words: readonly string[]): Promise<Call> {
  const [program, ...args] = words;
  const startedAt = performance.now();
  const child = startProgram(
    scratch,
    program as "status" | "loop-runner",
    [...args, "--json", ...(program === "status" && needsLock(args) ? ["--lock-timeout=300"] : [])],
    { env: { AUTOMATON_CONTEXT_TOKENS: "131072" } },
  );
  const result = await finish(child, 400_000);
  const endedAt = performance.now();
  return { words, startedAt, endedAt, code: result.code, json: lastJson(result) };
}

const needsLock = (args: readonly string[]): boolean =>
  /^--(resume-loop|check-gate|halt-loop)/.test(args[0]!) ||
  (args[0] === "--approve" && args[1]!.startsWith("--loop"));

/**
 * The views of a loop in the order of its log, which is written under the lock: one for each step that
 * changes what a brake depends on. Steps that no order of calls could give are problems.
 */
function replay(log: readonly Record<string, unknown>[]): { views: View[]; problems: string[] } {
  const state = { status: "running", halt_reason: null as string | null };
  const counts = { iteration_count: 0, resumed_count: 0 };
  const views = [viewOf({ ...state, ...counts })];
  const problems: string[] = [];
  for (const entry of log) {
    const from = state.status;
    const allow = (legal: readonly string[]) => {
      if (!legal.includes(from)) problems.push(`${entry.event} of a loop that is ${from}`);
    };
    if (entry.event === "PAUSED") {
      allow(["running"]);
      state.status = "paused";
    } else if (entry.event === "RESUMED") {
      allow(["paused"]);
      state.status = "running";
    } else if (entry.event === "HALTED") {
      allow(["running", "paused"]);
      Object.assign(state, { status: "halted", halt_reason: entry.halt_reason });
    } else if (entry.event === "APPROVED") {
      allow(["halted"]);
      Object.assign(state, { status: "running", halt_reason: null });
      counts.resumed_count++;
    } else if (entry.event === "TICK") {
      allow(["running"]);
      counts.iteration_count++;
    } else continue;
    for (const key of ["iteration_count", "resumed_count"] as const) {
      if (typeof entry[key] !== "number" || entry[key] === counts[key]) continue;
      problems.push(`${entry.event} says ${key} ${entry[key]}, by the log it is ${counts[key]}`);
    }
    views.push(viewOf({ ...state, ...counts }));
  }
  return { views, problems };
}

/** Somebody saw one of some views between two moments. */
interface Sight {
  readonly from: number;
  readonly to: number;
  readonly views: readonly View[];
  readonly what: string;
}

/**
 * Finds sights that fit no order: each is put at the earliest view that it can be of, not before those of
 * sights that had ended when it began.
 */
function findMisfits(views: readonly View[], sights: readonly Sight[]): string[] {
  const problems: string[] = [];
  const ended: { to: number; index: number }[] = [];
  for (const sight of [...sights].sort((a, b) => a.from - b.from)) {
    const bound = ended.reduce(
      (max, { to, index }) => to <= sight.from ? Math.max(max, index) : max,
      0,
    );
    const index = views.findIndex((view, at) => at >= bound && sight.views.includes(view));
    if (index < 0) {
      problems.push(`${sight.what} saw ${sight.views[0]}, which was not after ${views[bound]}`);
    } else ended.push({ to: sight.to, index });
  }
  return problems;
}

/** What a call's answer says that its caller saw; null for calls that say nothing of the loop. */
function sightOf({ words, startedAt, endedAt, json }: Call): Sight | null {
  if (!words[1]!.startsWith("--can-continue") || typeof json.state !== "string") return null;
  const { halt_reason, iteration_count, resumed_count } = json;
  const view = (status: string): View =>
    viewOf({ status, halt_reason, iteration_count, resumed_count } as Parameters<typeof viewOf>[0]);
  const word = json.state === "OK" ? "running" : json.state.toLowerCase();
  // A request to pause is told as the pause that it will be.
  const views = word === "paused" ? [view("paused"), view("running")] : [view(word)];
  return { from: startedAt, to: endedAt, views, what: "--can-continue" };
}

/** Compares the answers of the calls with the log and with the histories of the tasks. */
function checkAnswers(scratch: Scratch, calls: readonly Call[]): string[] {
  const log = readLog(scratch, LOOP);
  const problems: string[] = [];
  const compare = (what: string, told: number, logged: number) => {
    if (told !== logged) problems.push(`${told} ${what} were told, ${logged} happened`);
  };
  const countEvents = (event: string) => log.filter((entry) => entry.event === event).length;
  const isLoopApproval = ({ words, code }: Call) =>
    code === 0 && words[1] === "--approve" && words[2]!.startsWith("--loop");
  compare("approvals", calls.filter(isLoopApproval).length, countEvents("APPROVED"));
  const ticks = calls.filter(({ json }) => json.verdict !== undefined && json.verdict !== null);
  compare("ticks", ticks.length, countEvents("TICK"));
  for (const { name, history, phase } of readMemory(scratch).tasks.values()) {
    if (!TASKS.includes(name)) continue;
    const own = calls.filter(({ words, code }) => code === 0 && words.includes(`--task=${name}`));
    const moves = own.filter(({ words, json }) =>
      words[1]!.startsWith("--transition") || (words[1] === "--approve" && json.phase !== "spec")
    );
    compare(`steps of ${name}`, moves.length, history.length - 1);
    for (const [index, { from, to }] of history.entries()) {
      if (from === (history[index - 1]?.to ?? null)) continue;
      problems.push(`${name} went from ${from} to ${to} where it was in ${history[index - 1]?.to}`);
    }
    if (history.at(-1)?.to !== phase) problems.push(`${name} is in ${phase}, not where it went`);
  }
  return problems;
}

Deno.test({
  name: `${WIDTH} processes at a time leave what some order of their calls would leave`,
  ignore: Deno.build.os !== "linux",
  fn: async () => {
    const tally = new Tally("commands at once");
    using scratch = makeLoopScratch({
      verify: "verdict false 0.5",
      config: { brakes: { max_iterations: 1e6, score_plateau_window: 1e6 } },
    });
    for (const task of TASKS) {
      const dir = writeTask(scratch, task, "research");
      for (const name of ["RESEARCH.md", "DESIGN.md", "SPEC.md"]) {
        Deno.writeTextFileSync(join(dir, name), "written\n");
      }
    }
    const statePath = join(loopDir(scratch, LOOP), ".state.loop");
    const calls: Call[] = [];
    const sights: Sight[] = [];
    const endsAt = performance.now() + DURATION_MS;
    let isOver = false;
    const look = async () => {
      while (!isOver) {
        const from = performance.now();
        try {
          const state = parseLoopState(Deno.readTextFileSync(statePath), statePath);
          sights.push({ from, to: performance.now(), views: [viewOf(state)], what: "a reader" });
        } catch (error) {
          tally.lose("states lost", `a reader: ${error}`);
        }
        await new Promise((wake) => setTimeout(wake, 5));
      }
    };
    const work = async (number: number) => {
      const random = new Random(`caller ${number}`);
      while (performance.now() < endsAt) {
        const words = chooseCall(random);
        tally.tried++;
        try {
          const call = await makeCall(scratch, words);
          calls.push(call);
          if (call.code > 1) tally.lose("other", `${words.join(" ")}: exit code ${call.code}`);
        } catch (error) {
          const loss = `${error}`.includes("no end after") ? "stuck locks" : "other";
          tally.lose(loss, `${words.join(" ")}: ${error}`);
        }
      }
    };
    const reader = look();
    await Promise.all(Array.from({ length: WIDTH }, (_, number) => work(number)));
    isOver = true;
    await reader;

    const { views, problems } = replay(readLog(scratch, LOOP));
    const told = calls.map(sightOf).filter((sight) => sight !== null);
    const misfits = findMisfits(views, [...sights, ...told]);
    for (const problem of [...problems, ...misfits]) tally.lose("states lost", problem);
    for (const problem of checkAnswers(scratch, calls)) tally.lose("states lost", problem);
    const end = readMemory(scratch);
    for (const problem of end.problems) tally.lose("states lost", problem);
    const last = viewOf(end.loops.get(LOOP)!);
    if (last !== views.at(-1)) {
      tally.lose("states lost", `it ended as ${last}, not ${views.at(-1)}`);
    }
    for (const { command } of await awaitNoneLiving(scratch)) tally.lose("processes left", command);
    for (const lock of listHeldLocks(scratch)) tally.lose("stuck locks", lock);
    if (views.length < 5) {
      tally.lose("other", `only ${views.length} states in ${calls.length} calls`);
    }
    tally.close();
  },
});

Deno.test("the checker finds what no order of calls could give", () => {
  const [a, b, c] = ["running  0 0", "paused  0 0", "running  1 0"];
  const sight = (from: number, to: number, view: string): Sight => ({
    from,
    to,
    views: [view],
    what: "x",
  });
  const misfits = (...sights: Sight[]) => findMisfits([a, b, c], sights).length;
  const results = [
    misfits(sight(0, 1, a), sight(2, 3, b), sight(4, 5, c)),
    misfits(sight(0, 5, b), sight(1, 6, a)), // At the same time: either may have been first.
    misfits(sight(0, 1, b), sight(2, 3, a)), // One after the other, and back.
    misfits(sight(0, 1, "halted x 0 0")),
    replay([{ event: "PAUSED" }, { event: "TICK" }]).problems.length,
    replay([{ event: "TICK", iteration_count: 2 }]).problems.length,
    replay([{ event: "HALTED", halt_reason: "x" }, { event: "APPROVED", resumed_count: 1 }])
      .problems
      .length,
  ];
  const expected = [0, 0, 1, 1, 1, 1, 0];
  if (results.join() !== expected.join()) throw new Error(`${results} instead of ${expected}`);
});

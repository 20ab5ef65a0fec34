/**
 * Many people, ticks and audits on one project at the same time. Whatever each of them saw and was told
 * must be what some order of their calls, one after the other, could have given.
 */
import { assertEquals } from "@std/assert";
import { join } from "@std/path";
import {
  finish,
  holdLock,
  lastJson,
  loopDir,
  makeScratch,
  readJson,
  readLog,
  type Scratch,
  startProgram,
  taskDir,
  writeLoop,
  writeTask,
} from "../helpers.ts";
import { LOOP, makeLoopScratch, TASK } from "../runner_support.ts";
import { parseLoopState } from "../../scripts/status.ts";
import { awaitNoneLiving, IS_FULL, listHeldLocks, Random, readMemory, Tally } from "./support.ts";

const WIDTH = IS_FULL ? 50 : 16;
const DURATION_MS = IS_FULL ? 60_000 : 6000;
const TASKS = ["a", "b", "c", "d"];
/** Loops that take tasks, and have no ticks. */
const CLAIMERS = ["second", "third"];
const LOOPS = [LOOP, ...CLAIMERS];

/** What a loop is to somebody who looks: all that its brakes depend on. */
interface View {
  readonly status: string;
  readonly halt_reason: string | null;
  readonly iteration_count: number;
  readonly resumed_count: number;
}

const tell = ({ status, halt_reason, iteration_count, resumed_count }: View): string =>
  [status, halt_reason, iteration_count, resumed_count].join(" ");

/** One call of a program, from outside; times in milliseconds of the clock that logs are written by. */
interface Call {
  readonly words: readonly string[];
  readonly startedAt: number;
  readonly endedAt: number;
  readonly code: number;
  readonly json: Record<string, unknown>;
}

/** Calls that change a loop and take no time. */
const listQuick = (loop: string) =>
  [
    ["status", `--pause-loop=${loop}`],
    ["status", `--resume-loop=${loop}`],
    ["status", "--approve", `--loop=${loop}`],
    ["status", `--halt-loop=${loop}`, "--reason=human_intervention"],
    ["status", `--can-continue=${loop}`],
    ["status", `--check-gate=${loop}`],
  ] as const;

function chooseCall(random: Random): readonly string[] {
  const task = random.pick(TASKS);
  // A tick holds its lock for long, and gets nowhere where somebody always wants a pause: most of the
  // time it is the others who meet.
  const loops = [LOOP, ...CLAIMERS, ...CLAIMERS, ...CLAIMERS];
  if (random.below(2) > 0) return random.pick(listQuick(random.pick(loops)));
  const anyTask = random.pick([...TASKS, TASK]);
  return random.pick([
    ["loop-runner", "--mode=tick", `--loop=${LOOP}`],
    ["status", `--resume-loop=${LOOP}`],
    ["status", "--approve", `--loop=${LOOP}`],
    ["status", `--can-continue=${LOOP}`],
    ["status", "--audit"],
    ["status", "--claim", `--task=${anyTask}`, `--session=${random.pick(["x", "y"])}`],
    ["status", "--claim", `--task=${task}`, `--session=${random.pick(["x", "y"])}`],
    ["status", `--claim-loop-task=${random.pick(CLAIMERS)}`, `--task=${anyTask}`],
    ["status", `--claim-loop-task=${random.pick(CLAIMERS)}`, `--task=${task}`],
    ["status", "--release", `--task=${task}`],
    ["status", "--approve", `--task=${task}`],
    ["status", `--transition=${random.pick(["design", "spec", "implement"])}`, `--task=${task}`],
    ["status", "--transition=human_intervention", `--task=${task}`, "--reason=a question"],
    ["status", "--transition=research", `--task=${task}`, "--reason=again"],
  ]);
}

/** The value of an option of a call; null where it has none. */
function optionOf({ words }: Pick<Call, "words">, name: string): string | null {
  const word = words.find((each) => each.startsWith(`--${name}=`));
  return word === undefined ? null : word.slice(name.length + 3);
}

/** What a call is, without its values: `--pause-loop`, `--approve --task`. */
function kindOf({ words }: Pick<Call, "words">): string {
  const names = words.slice(1).map((word) => word.split("=")[0]!);
  return names[0] === "--approve" ? `${names[0]} ${names[1]}` : names[0]!;
}

/** Why each kind of call may be refused; any other failure is one. */
const REFUSALS: Readonly<Record<string, RegExp>> = {
  "--pause-loop": /it is (halted \(\w+\)|running), so it does not tick$/,
  "--resume-loop": /it is halted \(\w+\), not paused$/,
  "--approve --loop": /it is (running|paused) now$/,
  "--claim": /(loop [\w-]+|[xyz]) has it$/,
  "--release": /loop [\w-]+ has it( and is halted)?$/,
  "--claim-loop-task": /(it is halted|it waits for a person|(loop [\w-]+|[xyz]) has it)$/,
  "--approve --task": /(in \w+ there is nothing to approve|it was approved at \S+)$/,
  "--transition":
    /(it is there already|it waits for a person|the next phase is \w+|no person has approved it|such a step needs a reason|loop [\w-]+, which owns it, is halted)$/,
};

/** Every kind of call that must have been answered with success, a pause in each of its two ways. */
const SUCCESSES = [
  ...Object.keys(REFUSALS).filter((kind) => kind !== "--pause-loop"),
  "paused",
  "pausing",
  "--halt-loop",
  "--check-gate",
  "--can-continue",
  "--audit",
  "--mode",
];

/** The failures of calls, and the kinds of call that never had success. */
function checkSuccesses(calls: readonly Call[]): { failures: string[]; missed: string[] } {
  const seen = new Set<string>();
  const failures: string[] = [];
  for (const call of calls) {
    const { words, code, json } = call;
    const kind = kindOf(call);
    if (code !== 0) {
      if (code === 1 && REFUSALS[kind]?.test(`${json.error}`)) continue;
      failures.push(`${words.join(" ")}: exit code ${code}: ${json.error}`);
    } else if (kind === "--pause-loop") seen.add(`${json.status}`);
    else if (kind !== "--mode" || (json.skipped === false && json.verdict !== null)) seen.add(kind);
  }
  return { failures, missed: SUCCESSES.filter((kind) => !seen.has(kind)) };
}

async function makeCall(scratch: Scratch, words: readonly string[]): Promise<Call> {
  const [program, ...args] = words;
  const startedAt = Date.now();
  const child = startProgram(
    scratch,
    program as "status" | "loop-runner",
    [...args, "--json", ...(program === "status" && needsLock(args) ? ["--lock-timeout=300"] : [])],
    { env: { AUTOMATON_CONTEXT_TOKENS: "131072" } },
  );
  const result = await finish(child, 400_000);
  const endedAt = Date.now();
  return { words, startedAt, endedAt, code: result.code, json: lastJson(result) };
}

const needsLock = (args: readonly string[]): boolean =>
  /^--(resume-loop|check-gate|halt-loop)/.test(args[0]!) ||
  (args[0] === "--approve" && args[1]!.startsWith("--loop"));

/** What a loop came to be, and when its log said so; that is just after it was saved. */
interface Step {
  readonly at: number;
  readonly view: View;
}

/**
 * What a loop was in the order of its log, which is written under the lock: one step for each change of
 * what a brake depends on. Changes that no order of calls could give are problems.
 */
function replay(log: readonly Record<string, unknown>[]): { steps: Step[]; problems: string[] } {
  const state = { status: "running", halt_reason: null as string | null };
  const counts = { iteration_count: 0, resumed_count: 0 };
  const steps: Step[] = [{ at: 0, view: { ...state, ...counts } }];
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
    steps.push({ at: Date.parse(`${entry.at}`), view: { ...state, ...counts } });
  }
  return { steps, problems };
}

/** Somebody saw a loop, or was told of it, between two moments. */
interface Sight {
  readonly from: number;
  readonly to: number;
  readonly fits: (view: View) => boolean;
  readonly what: string;
  /** True for one who held the lock: the log of what was seen was written before, too. */
  readonly isLocked: boolean;
}

/**
 * Finds sights that fit no order: each is put at the earliest step that it can be of, not before those of
 * sights that had ended when it began, and not at one that was to come, or over, by the log's times.
 */
function findMisfits(steps: readonly Step[], sights: readonly Sight[]): string[] {
  const problems: string[] = [];
  const ended: { to: number; index: number }[] = [];
  for (const sight of [...sights].sort((a, b) => a.from - b.from)) {
    const { from, to, fits, what, isLocked } = sight;
    const bound = ended.reduce((max, last) => last.to < from ? Math.max(max, last.index) : max, 0);
    const index = steps.findIndex(({ view }, at) => {
      // What is saved can be seen before it is logged, but not before what was logged earlier.
      const startsAt = steps[isLocked ? at : at - 1]?.at ?? 0;
      return at >= bound && startsAt <= to && (steps[at + 1]?.at ?? Infinity) >= from && fits(view);
    });
    if (index >= 0) ended.push({ to, index });
    else {
      const late = steps.filter(({ at }) => at <= to).at(-1)!;
      problems.push(
        `${what}, at ${from}-${to}: not after ${tell(steps[bound]!.view)}, and ${
          tell(late.view)
        } in the end`,
      );
    }
  }
  return problems;
}

/** What a call's answer says of its loop; null for calls that say nothing of it. */
function sightOf(call: Call): Sight | null {
  const { words, startedAt, endedAt, code, json } = call;
  const kind = kindOf(call);
  const see = (isLocked: boolean, status: string, more: Partial<View> = {}): Sight => ({
    from: startedAt,
    to: endedAt,
    what: `${words.slice(1).join(" ")} said ${status}${
      Object.entries(more).map(([key, value]) => ` ${key}=${value}`).join("")
    }`,
    isLocked,
    fits: (view) =>
      view.status === status &&
      Object.entries(more).every(([key, value]) => view[key as keyof View] === value),
  });
  const { halt_reason, iteration_count, resumed_count } = json as unknown as View;
  if (kind === "--can-continue" && typeof json.state === "string") {
    const word = json.state === "OK" ? "running" : json.state.toLowerCase();
    const sight = see(false, word, { halt_reason, iteration_count, resumed_count });
    if (word !== "paused") return sight;
    // A request to pause is told as the pause that it will be.
    return { ...sight, fits: (view) => sight.fits({ ...view, status: word }) && isGoing(view) };
  }
  if (kind === "--check-gate" && code === 0) {
    if (json.reason === "paused") return see(true, "paused");
    return json.ok === true ? see(true, "running") : see(true, "halted", { halt_reason });
  }
  if (kind === "--approve --loop" && code === 0) return see(true, "running", { resumed_count });
  if (kind === "--halt-loop" && code === 0) return see(true, `${json.status}`, { halt_reason });
  if (kind === "--resume-loop" && code === 0) return see(true, `${json.status}`);
  if (kind === "--pause-loop" && json.status === "paused") return see(true, "paused");
  const [, status] = /: it is (\w+)/.exec(`${json.error}`) ?? [];
  if (code !== 1 || status === undefined) return null;
  if (["--approve --loop", "--resume-loop"].includes(kind)) return see(true, status);
  return kind === "--pause-loop" ? see(false, status) : null;
}

const isGoing = ({ status }: View): boolean => status === "running" || status === "paused";

/** True where a call may have come between two others, by their times. */
const isBetween = (call: Call, first: Call, last: Call): boolean =>
  call.endedAt >= first.startedAt && call.startedAt <= last.endedAt;

const isBefore = (first: Call, last: Call): boolean => first.endedAt < last.startedAt;

/** Finds approvals without their own line in the log, and requests to pause that came to nothing. */
function checkRequests(log: readonly Record<string, unknown>[], calls: readonly Call[]): string[] {
  const problems: string[] = [];
  const done = calls.filter(({ code }) => code === 0);
  const isLogged = (events: readonly string[], from: number, to: number) =>
    log.some(({ event, at }) => {
      const time = Date.parse(`${at}`);
      return events.includes(`${event}`) && time >= from && time <= to;
    });
  for (const approval of done.filter((call) => kindOf(call) === "--approve --loop")) {
    if (isLogged(["APPROVED"], approval.startedAt, approval.endedAt)) continue;
    problems.push(`an approval at ${approval.startedAt} was told, and none is logged`);
  }
  const resumes = done.filter((call) => kindOf(call) === "--resume-loop");
  const goings = done.filter((call) =>
    (kindOf(call) === "--can-continue" && call.json.state === "OK") ||
    (kindOf(call) === "--check-gate" && call.json.ok === true)
  );
  for (const request of done.filter(({ json }) => json.status === "pausing")) {
    const going = goings.find((going) =>
      isBefore(request, going) &&
      !isLogged(["PAUSED", "RESUMED", "HALTED", "APPROVED"], request.startedAt, going.endedAt) &&
      !resumes.some((resume) => isBetween(resume, request, going))
    );
    if (going === undefined) continue;
    problems.push(
      `a pause was asked for at ${request.startedAt}, ${
        going.words.join(" ")
      } was free to go on at ${going.startedAt}`,
    );
  }
  return problems;
}

/** Who has which task in the end. */
interface Owners {
  /** The session that has each task. */
  readonly sessions: Readonly<Record<string, string | null>>;
  /** The task that each loop has. */
  readonly loops: Readonly<Record<string, string | null>>;
}

/** Finds claims that were granted while somebody else had the task, and owners that nobody can have made. */
function checkClaims(calls: readonly Call[], owners: Owners): string[] {
  const done = calls.filter(({ code }) => code === 0);
  const ofKind = (kind: string) => done.filter((call) => kindOf(call) === kind);
  const [claims, releases, takes] = ["--claim", "--release", "--claim-loop-task"].map(ofKind);
  const taskOf = (call: Call) => optionOf(call, "task");
  const ownerOf = (call: Call) => optionOf(call, "session") ?? optionOf(call, "claim-loop-task");
  /** The calls by which the owner that a claim made may have lost the task again. */
  const listEnds = (claim: Call) =>
    kindOf(claim) === "--claim"
      ? releases!.filter((call) => taskOf(call) === taskOf(claim))
      : takes!.filter((call) => ownerOf(call) === ownerOf(claim) && taskOf(call) !== taskOf(claim));
  const problems: string[] = [];
  const all = [...claims!, ...takes!];
  for (const first of all) {
    for (const last of all) {
      const isUnrelated = taskOf(first) !== taskOf(last) || ownerOf(first) === ownerOf(last);
      if (isUnrelated || !isBefore(first, last)) continue;
      if (listEnds(first).some((end) => isBetween(end, first, last))) continue;
      problems.push(`${ownerOf(last)} got ${taskOf(last)}, which ${ownerOf(first)} had`);
    }
  }
  const mayLast = (claim: Call) => !listEnds(claim).some((end) => isBefore(claim, end));
  const mustLast = (claim: Call) => !listEnds(claim).some((end) => !isBefore(end, claim));
  const compare = (
    what: string,
    own: readonly Call[],
    has: (call: Call) => boolean,
    end: unknown,
  ) => {
    const isExplained = end === null ? !own.some(mustLast) : own.some((c) => has(c) && mayLast(c));
    if (!isExplained) {
      problems.push(`${what} has ${end} in the end, by no order of ${own.length} claims`);
    }
  };
  for (const [task, session] of Object.entries(owners.sessions)) {
    const own = claims!.filter((call) => taskOf(call) === task);
    compare(`task ${task}`, own, (call) => ownerOf(call) === session, session);
  }
  for (const [loop, task] of Object.entries(owners.loops)) {
    const own = takes!.filter((call) => ownerOf(call) === loop);
    compare(`loop ${loop}`, own, (call) => taskOf(call) === task, task);
  }
  return problems;
}

/** Compares the answers of the calls with the logs and with the histories of the tasks. */
function checkAnswers(scratch: Scratch, calls: readonly Call[]): string[] {
  const problems: string[] = [];
  const compare = (what: string, told: number, logged: number) => {
    if (told !== logged) problems.push(`${told} ${what} were told, ${logged} happened`);
  };
  for (const loop of LOOPS) {
    const log = readLog(scratch, loop);
    const own = calls.filter(({ words }) => words.some((word) => word.endsWith(`=${loop}`)));
    problems.push(...checkRequests(log, own).map((problem) => `${loop}: ${problem}`));
    const countEvents = (event: string) => log.filter((entry) => entry.event === event).length;
    const approvals = own.filter((call) => call.code === 0 && kindOf(call) === "--approve --loop");
    compare(`approvals of ${loop}`, approvals.length, countEvents("APPROVED"));
    // One that is paused between its roles may have a verdict, and has saved nothing.
    const ticks = own.filter(({ json }) => !json.skipped && (json.verdict ?? null) !== null);
    compare(`ticks of ${loop}`, ticks.length, countEvents("TICK"));
  }
  const memory = readMemory(scratch);
  for (const { name, history, phase } of memory.tasks.values()) {
    if (!TASKS.includes(name)) continue;
    const own = calls.filter(({ words, code }) => code === 0 && words.includes(`--task=${name}`));
    const moves = own.filter((call) =>
      kindOf(call) === "--transition" ||
      (kindOf(call) === "--approve --task" && call.json.phase !== "spec")
    );
    compare(`steps of ${name}`, moves.length, history.length - 1);
    for (const { startedAt, endedAt, json } of moves) {
      const isTaken = history.some(({ at, to }) =>
        to === json.phase && Date.parse(at) >= startedAt && Date.parse(at) <= endedAt
      );
      if (!isTaken) {
        problems.push(`${name} was moved to ${json.phase} at ${startedAt}, and was not`);
      }
    }
    for (const [index, { from, to }] of history.entries()) {
      if (from === (history[index - 1]?.to ?? null)) continue;
      problems.push(`${name} went from ${from} to ${to} where it was in ${history[index - 1]?.to}`);
    }
    if (history.at(-1)?.to !== phase) problems.push(`${name} is in ${phase}, not where it went`);
  }
  // The one claim that was there from the start.
  const words = ["status", `--claim-loop-task=${LOOP}`, `--task=${TASK}`];
  const first = { words, startedAt: 0, endedAt: 0, code: 0, json: {} };
  const owners = {
    sessions: Object.fromEntries([...memory.tasks].map(([name, task]) => [name, task.claimed_by])),
    loops: Object.fromEntries([...memory.loops].map(([name, loop]) => [name, loop.current_task])),
  };
  return [...problems, ...checkClaims([first, ...calls], owners)];
}

/** The inode of every lock file, which is made first where there is none. */
function listLockInodes(scratch: Scratch): string {
  const dirs = [
    ...LOOPS.map((loop) => loopDir(scratch, loop)),
    ...[...TASKS, TASK].map((task) => taskDir(scratch, task)),
  ];
  return dirs.map((dir) => {
    using file = Deno.openSync(join(dir, ".state.lock"), {
      read: true,
      append: true,
      create: true,
    });
    return file.statSync().ino;
  }).join();
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
    for (const loop of CLAIMERS) writeLoop(scratch, loop, { work_source: { kind: "single" } });
    const inodes = listLockInodes(scratch);
    const calls: Call[] = [];
    const sights: Record<string, Sight[]> = Object.fromEntries(LOOPS.map((loop) => [loop, []]));
    const endsAt = performance.now() + DURATION_MS;
    let isOver = false;
    let isAnyMissed = true;
    // Among so many a tick may never come to its end: a few go on until each kind of call had success.
    const goesOn = (number: number) =>
      performance.now() < endsAt ||
      (IS_FULL && number < 6 && isAnyMissed && performance.now() < endsAt + 90_000);
    const look = async () => {
      for (let turn = 0; !isOver; turn++) {
        if (turn % 50 === 0) isAnyMissed = checkSuccesses(calls).missed.length > 0;
        for (const loop of LOOPS) {
          const path = join(loopDir(scratch, loop), ".state.loop");
          const from = Date.now();
          try {
            const seen = tell(parseLoopState(Deno.readTextFileSync(path), path));
            const fits = (view: View) => tell(view) === seen;
            const what = `a reader saw ${seen}`;
            sights[loop]!.push({ from, to: Date.now(), fits, what, isLocked: false });
          } catch (error) {
            tally.lose("states lost", `a reader: ${error}`);
          }
        }
        await new Promise((wake) => setTimeout(wake, 10));
      }
    };
    const work = async (number: number) => {
      const random = new Random(`caller ${number}`);
      while (goesOn(number)) {
        const words = chooseCall(random);
        tally.tried++;
        try {
          const call = await makeCall(scratch, words);
          calls.push(call);
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

    // A request to pause that is still there is honoured now.
    for (const loop of LOOPS) {
      calls.push(await makeCall(scratch, ["status", `--check-gate=${loop}`]));
    }

    const end = readMemory(scratch);
    const lost = [...end.problems, ...checkAnswers(scratch, calls)];
    let stepCount = 0;
    for (const loop of LOOPS) {
      const { steps, problems } = replay(readLog(scratch, loop));
      const own = calls.filter(({ words }) => words.some((word) => word.endsWith(`=${loop}`)));
      const told = own.map(sightOf).filter((sight) => sight !== null);
      lost.push(...[...problems, ...findMisfits(steps, [...sights[loop]!, ...told])]
        .map((problem) => `${loop}: ${problem}`));
      const [last, logged] = [tell(end.loops.get(loop)!), tell(steps.at(-1)!.view)];
      if (last !== logged) lost.push(`${loop} ended as ${last}, not ${logged}`);
      stepCount += steps.length;
    }
    if (stepCount < LOOPS.length + 4) {
      tally.lose("other", `only ${stepCount} states in ${calls.length} calls`);
    }
    for (const problem of lost) tally.lose("states lost", problem);
    const { failures, missed } = checkSuccesses(calls);
    for (const failure of failures) tally.lose("other", failure);
    if (IS_FULL && missed.length > 0) tally.lose("other", `never a success: ${missed}`);
    if (listLockInodes(scratch) !== inodes) tally.lose("stuck locks", "a lock file was replaced");
    for (const { command } of await awaitNoneLiving(scratch)) tally.lose("processes left", command);
    for (const lock of listHeldLocks(scratch)) tally.lose("stuck locks", lock);
    tally.close();
  },
});

Deno.test("of sessions and loops that claim one task at a time, one gets it", async () => {
  using scratch = makeScratch("a project");
  const loops = ["l", "m", "n"];
  for (const loop of loops) writeLoop(scratch, loop, { work_source: { kind: "single" } });
  const ofSessions = ["x", "y", "z"].map((session) => ["--claim", `--session=${session}`]);
  const ofLoops = loops.map((loop) => [`--claim-loop-task=${loop}`]);
  // Those of one list at once, one list after the other.
  const orders = [[[...ofSessions, ...ofLoops]], [ofLoops], [ofLoops.slice(0, 1), ofSessions]];
  for (let round = 0; round < (IS_FULL ? 30 : 3); round++) {
    const name = `task-${round}`;
    writeTask(scratch, name);
    const calls: Call[] = [];
    for (const claims of orders[round % orders.length]!) {
      calls.push(
        ...await Promise.all(
          claims.map((words) => makeCall(scratch, ["status", ...words, `--task=${name}`])),
        ),
      );
    }
    const winners = calls.filter(({ code }) => code === 0).map(({ words }) => words.join(" "));
    const { failures } = checkSuccesses(calls);
    assertEquals([winners.length, failures], [1, []], `round ${round}: ${winners}`);
    const { claimed_by, loop } = readJson(join(taskDir(scratch, name), ".state"));
    assertEquals(winners[0]!.includes(`=${claimed_by ?? loop} `), true, `${claimed_by}, ${loop}`);
  }
});

Deno.test("a request to pause that finds the lock held stands until somebody honours it", async () => {
  using scratch = makeScratch("a project");
  for (const next of [["--check-gate=l"], ["--pause-loop=l"]]) {
    const dir = writeLoop(scratch, "l", { work_source: { kind: "single" } });
    const path = join(dir, ".state.lock");
    {
      // As a tick does: another command would be waited for.
      using _ = holdLock(path, { pid: Deno.pid, host: Deno.hostname() });
      const { json } = await makeCall(scratch, ["status", "--pause-loop=l"]);
      assertEquals(json.status, "pausing");
      const asked = await makeCall(scratch, ["status", "--can-continue=l"]);
      assertEquals(asked.json.state, "PAUSED");
      assertEquals(readJson(join(dir, ".state.loop")).status, "running");
    }
    const { json } = await makeCall(scratch, ["status", ...next]);
    assertEquals(json.status ?? json.reason, "paused");
    assertEquals(readJson(join(dir, ".state.loop")).status, "paused");
    assertEquals(readLog(scratch, "l").at(-1)?.event, "PAUSED");
  }
});

/** A call that was answered, for the checker's own tests. */
function answered(
  words: string,
  startedAt: number,
  endedAt: number,
  json: Readonly<Record<string, unknown>> = {},
): Call {
  return {
    words: ["status", ...words.split(" ")],
    startedAt,
    endedAt,
    code: json.error ? 1 : 0,
    json,
  };
}

/** A line of a log whose times are as small as those of the calls. */
const logged = (event: string, at: number, fields: Readonly<Record<string, unknown>> = {}) => ({
  event,
  at: new Date(at).toISOString(),
  ...fields,
});

function expectCounts(found: Readonly<Record<string, readonly [string[], number]>>): void {
  const wrong = Object.entries(found).filter(([, [problems, count]]) => problems.length !== count);
  const told = wrong.map(([name, [problems, count]]) =>
    `${name}: ${problems.length} instead of ${count}: ${problems.join("; ")}`
  );
  if (told.length > 0) throw new Error(told.join("\n"));
}

Deno.test("the checker finds logs and sights that no order of calls could give", () => {
  const log = [
    logged("PAUSED", 100),
    logged("RESUMED", 200),
    logged("HALTED", 300, { halt_reason: "x" }),
    logged("APPROVED", 400, { resumed_count: 1 }),
  ];
  const { steps, problems } = replay(log);
  const sight = (from: number, to: number, text: string): Sight => ({
    from,
    to,
    fits: (view) => tell(view) === text,
    what: text,
    isLocked: false,
  });
  const [a, b, c, d] = ["running  0 0", "paused  0 0", "halted x 0 0", "running  0 1"];
  const misfits = (...sights: Sight[]) => findMisfits(steps, sights);
  const told = (words: string, from: number, to: number, json: Record<string, unknown>) =>
    misfits(sightOf(answered(words, from, to, json))!);
  const halt = "--halt-loop=l --reason=x";
  const approve = "--approve --loop=l";
  const ask = { halt_reason: null, iteration_count: 0, resumed_count: 0 };
  expectCounts({
    "a good log": [problems, 0],
    "one after the other": [misfits(sight(0, 1, a), sight(110, 120, b), sight(310, 320, c)), 0],
    "at the same time": [misfits(sight(90, 250, b), sight(91, 260, a)), 0],
    "one after the other, and back": [misfits(sight(90, 95, b), sight(96, 99, a)), 1],
    "never": [misfits(sight(0, 1, "halted y 0 0")), 1],
    "long over": [misfits(sight(310, 320, b)), 1],
    "to come, after the next": [misfits(sight(0, 50, d)), 1],
    "saved, not yet logged": [misfits(sight(90, 95, b)), 0],
    "a tick of a paused loop": [replay([logged("PAUSED", 1), logged("TICK", 2)]).problems, 1],
    "a wrong count": [replay([logged("TICK", 1, { iteration_count: 2 })]).problems, 1],
    "paused": [told("--pause-loop=l", 90, 110, { status: "paused" }), 0],
    "paused before": [told("--pause-loop=l", 120, 130, { status: "paused" }), 0],
    "not paused": [told("--pause-loop=l", 10, 20, { status: "paused" }), 1],
    "resumed": [told("--resume-loop=l", 190, 210, { status: "running" }), 0],
    "not resumed": [told("--resume-loop=l", 110, 120, { status: "running" }), 1],
    "halted": [told(halt, 290, 310, { status: "halted", halt_reason: "x" }), 0],
    "not halted": [told(halt, 210, 220, { status: "halted", halt_reason: "x" }), 1],
    "halted for another reason": [told(halt, 290, 310, { status: "halted", halt_reason: "y" }), 1],
    "approved": [told(approve, 390, 410, { resumed_count: 1 }), 0],
    "approved once more": [told(approve, 390, 410, { resumed_count: 2 }), 1],
    "approved too early": [told(approve, 310, 320, { resumed_count: 1 }), 1],
    "gate ok": [told("--check-gate=l", 210, 220, { ok: true, reason: "ok" }), 0],
    "gate of a paused loop ok": [told("--check-gate=l", 110, 120, { ok: true, reason: "ok" }), 1],
    "gate sees the pause": [told("--check-gate=l", 110, 120, { ok: false, reason: "paused" }), 0],
    "gate sees no pause": [told("--check-gate=l", 10, 20, { ok: false, reason: "paused" }), 1],
    "asked": [told("--can-continue=l", 10, 20, { state: "OK", ...ask }), 0],
    "asked, with a request": [told("--can-continue=l", 10, 20, { state: "PAUSED", ...ask }), 0],
    "asked of a halted one": [told("--can-continue=l", 310, 320, { state: "OK", ...ask }), 1],
    "refused": [told(approve, 110, 120, { error: "no: it is paused now" }), 0],
    "refused for nothing": [told(approve, 310, 320, { error: "no: it is running now" }), 1],
    "resume refused for nothing": [
      told("--resume-loop=l", 210, 220, { error: "n: it is halted" }),
      1,
    ],
  });
});

Deno.test("the checker finds requests and approvals that came to nothing", () => {
  const approval = answered("--approve --loop=l", 10, 20);
  const request = answered("--pause-loop=l", 10, 20, { status: "pausing" });
  const going = answered("--can-continue=l", 30, 40, { state: "OK" });
  const gate = answered("--check-gate=l", 30, 40, { ok: true, reason: "ok" });
  const resume = answered("--resume-loop=l", 15, 35, { status: "running" });
  const late = answered("--resume-loop=l", 50, 60, { status: "running" });
  expectCounts({
    "an approval": [checkRequests([logged("APPROVED", 15)], [approval]), 0],
    "an approval by another": [checkRequests([logged("APPROVED", 25)], [approval]), 1],
    "a request": [checkRequests([], [request]), 0],
    "a request that was forgotten": [checkRequests([], [request, going]), 1],
    "a request that the gate forgot": [checkRequests([], [request, gate, late]), 1],
    "a request that was honoured": [checkRequests([logged("PAUSED", 25)], [request, going]), 0],
    "a request that was taken back": [checkRequests([], [request, resume, going]), 0],
    "a request honoured too late": [checkRequests([logged("PAUSED", 45)], [request, going]), 1],
  });
});

Deno.test("the checker finds claims that only one can have, and owners that nobody made", () => {
  const claim = (session: string, from: number, to: number) =>
    answered(`--claim --task=a --session=${session}`, from, to);
  const take = (loop: string, from: number, to: number, task = "a") =>
    answered(`--claim-loop-task=${loop} --task=${task}`, from, to);
  const release = (from: number, to: number) => answered("--release --task=a", from, to);
  const check = (calls: readonly Call[], session: string | null, loop: string | null = null) =>
    checkClaims(calls, { sessions: { a: session }, loops: { l: loop } });
  const refused = { ...claim("y", 30, 40), code: 1 };
  expectCounts({
    "one": [check([claim("x", 10, 20)], "x"), 0],
    "twice the same": [check([claim("x", 10, 20), claim("x", 30, 40)], "x"), 0],
    "a refused one": [check([claim("x", 10, 20), refused], "x"), 0],
    "two": [check([claim("x", 10, 20), claim("y", 30, 40)], "x"), 1],
    "two, released": [check([claim("x", 10, 20), release(22, 25), claim("y", 30, 40)], "y"), 0],
    "two, released too late": [
      check([claim("x", 10, 20), claim("y", 30, 40), release(50, 60)], null),
      1,
    ],
    "two at once": [check([claim("x", 10, 20), release(15, 30), claim("y", 15, 30)], "y"), 0],
    "a loop's": [check([take("l", 10, 20), claim("x", 30, 40)], "x", "a"), 1],
    "a loop's, which went on": [
      check([take("l", 10, 20), take("l", 22, 25, "b"), claim("x", 30, 40)], "x", "b"),
      0,
    ],
    "a session's": [check([claim("x", 10, 20), take("l", 30, 40)], "x", "a"), 1],
    "another loop's": [check([take("l", 10, 20), take("m", 30, 40)], null, "a"), 1],
    "a claim that was not saved": [check([claim("x", 10, 20)], null), 1],
    "a release that was not saved": [check([claim("x", 10, 20), release(30, 40)], "x"), 1],
    "a session that never claimed": [check([claim("x", 10, 20)], "y"), 1],
    "a loop's claim that was not saved": [check([take("l", 10, 20)], null, null), 1],
    "a loop with an old task": [check([take("l", 10, 20), take("l", 30, 40, "b")], null, "a"), 1],
  });
});

Deno.test("the checker finds failures without a known reason, and what never had success", () => {
  const failed = (words: string, error: string) =>
    checkSuccesses([answered(words, 0, 1, { error })]);
  const { missed } = checkSuccesses([
    answered("--pause-loop=l", 0, 1, { status: "paused" }),
    answered("--mode=tick --loop=l", 0, 1, { verdict: null }),
    answered("--approve --task=a", 0, 1),
  ]);
  expectCounts({
    "a known reason": [failed("--claim --task=a", 'Cannot claim task "a": x has it').failures, 0],
    "a full lock": [failed("--claim --task=a", 'Cannot lock task "a": held').failures, 1],
    "a failed halt": [failed("--halt-loop=l", "Cannot halt").failures, 1],
    "what was missed": [missed, SUCCESSES.length - 2],
  });
});

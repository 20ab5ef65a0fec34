/**
 * Properties that hold for any input: the steps of tasks and the states of loops against small models
 * that know nothing of the programs, and the texts that go into prompts and command lines.
 */
import { assert, assertEquals } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { fc, THOROUGHNESS } from "../deps.ts";
import {
  makeScratch,
  readJson,
  run,
  type Scratch,
  taskDir,
  writeLoop,
  writeTask,
} from "../helpers.ts";
import {
  fillPrompt,
  listBacklogItems,
  quoteForSh,
  slugify,
  substituteTokens,
  truncateTokens,
} from "../../scripts/loop-runner.ts";
import { NAME_PATTERN, runStatus } from "../../scripts/status.ts";
import { SEED } from "./support.ts";

const RUNS = { numRuns: 500 * THOROUGHNESS };
/** For properties that start programs or write files. */
const FEW_RUNS = { ...RUNS, numRuns: RUNS.numRuns / 25 };
/** For those that run through states: enough of them to take every step. */
const WALKS = { ...RUNS, numRuns: Math.max(60, FEW_RUNS.numRuns) };

/** Lists of actions that are long enough to get somewhere; left to itself fast-check keeps them short. */
const LONG = { minLength: 5, maxLength: 120, size: "max" } as const;

/** What the last command line wrote to stdout. */
let answer = "";

/** Runs a command line of status within this process: hundreds a second instead of ten. */
async function call(scratch: Scratch, args: readonly string[]): Promise<number> {
  const { log, error } = console;
  answer = "";
  console.log = (text: string) => void (answer += `${text}\n`);
  console.error = () => {};
  try {
    return await runStatus([...args, `--project=${scratch.project}`]);
  } finally {
    Object.assign(console, { log, error });
  }
}

/** Runs a property that takes steps, again with other choices while one of the steps was not taken. */
async function walk<T>(
  property: fc.IAsyncPropertyWithHooks<T>,
  steps: readonly string[],
  taken: ReadonlySet<string>,
): Promise<void> {
  const listMissed = () => steps.filter((step) => !taken.has(step));
  for (let round = 0; round === 0 || (round < 5 && listMissed().length > 0); round++) {
    await fc.assert(property, { ...WALKS, seed: (SEED + round) | 0 });
  }
  assertEquals(listMissed(), [], "steps that nothing took");
}

// Tasks

const PIPELINE = ["research", "design", "spec", "implement", "code_review", "bug_hunt", "complete"];
const DOCUMENTS = ["RESEARCH", "DESIGN", "SPEC", "IMPLEMENTATION", "CODE_REVIEW", "BUG_REPORT"];
const WAITING = "human_intervention";

/** What a person would keep on paper about one task, and about the loop that may have it. */
interface TaskModel {
  phase: string;
  previous: string | null;
  isApproved: boolean;
  claimedBy: string | null;
  steps: number;
  readonly written: Set<string>;
  /** Whether the task names the loop "owner", and what that loop says of itself. */
  isOfLoop: boolean;
  isCurrent: boolean;
  loopStatus: typeof LOOP_STATUSES[number];
}

const LOOP_STATUSES = ["running", "paused", "halted", "complete"] as const;

const taskAction = fc.oneof(
  // The document of the phase and the next phase far more often than chance would have it, so that
  // tasks get somewhere.
  {
    arbitrary: fc.record({
      do: fc.constant("write" as const),
      document: fc.constantFrom("own", "own", "own", ...DOCUMENTS),
    }),
    weight: 8,
  },
  {
    arbitrary: fc.record({
      do: fc.constant("blank" as const),
      document: fc.constantFrom("own", ...DOCUMENTS),
    }),
    weight: 1,
  },
  {
    arbitrary: fc.record({
      do: fc.constant("move" as const),
      to: fc.constantFrom("implement", ...PIPELINE, WAITING, WAITING, WAITING),
      hasReason: fc.constantFrom(true, true, false),
    }),
    weight: 8,
  },
  {
    arbitrary: fc.record({
      do: fc.constant("move" as const),
      to: fc.constant("next"),
      hasReason: fc.boolean(),
    }),
    weight: 12,
  },
  { arbitrary: fc.record({ do: fc.constant("approve" as const) }), weight: 8 },
  {
    arbitrary: fc.record({ do: fc.constant("claim" as const), session: fc.constantFrom("a", "b") }),
    weight: 1,
  },
  { arbitrary: fc.record({ do: fc.constant("release" as const) }), weight: 1 },
  {
    arbitrary: fc.record({
      do: fc.constant("own" as const),
      isOfLoop: fc.boolean(),
      isCurrent: fc.boolean(),
      // Halted seldom: nothing moves until the next of these.
      status: fc.constantFrom("running" as const, "complete" as const, ...LOOP_STATUSES),
    }),
    weight: 1,
  },
);
type TaskAction = typeof taskAction extends fc.Arbitrary<infer T> ? T : never;

const documentOf = (phase: string): string | undefined => DOCUMENTS[PIPELINE.indexOf(phase)];

/** Moves the model; false where the pipeline, or the halt of the task's loop, refuses. */
function moveModel(model: TaskModel, to: string, hasReason: boolean): boolean {
  const [here, there] = [PIPELINE.indexOf(model.phase), PIPELINE.indexOf(to)];
  if (model.loopStatus === "halted" && (model.isOfLoop || model.isCurrent)) return false;
  if (model.phase === WAITING || to === model.phase) return false;
  if (to === WAITING) {
    if (!hasReason) return false;
  } else if (there < here) {
    const isRework = to === "implement" && ["code_review", "bug_hunt"].includes(model.phase);
    if (!isRework && !hasReason) return false;
  } else {
    if (there !== here + 1 || !model.written.has(documentOf(model.phase)!)) return false;
    if (to === "implement" && !model.isApproved) return false;
  }
  takeStep(model, to);
  return true;
}

function takeStep(model: TaskModel, to: string): void {
  model.previous = model.phase;
  model.phase = to;
  model.steps++;
  if (to !== WAITING && PIPELINE.indexOf(to) < 3) model.isApproved = false;
  if (to === WAITING || to === "complete") model.isOfLoop = false;
}

function approveModel(model: TaskModel): boolean {
  const hasSpec = model.written.has("SPEC");
  if (model.phase === "spec") {
    if (!hasSpec || model.isApproved) return false;
    return model.isApproved = true;
  }
  if (model.phase !== WAITING) return false;
  const wasApproved = model.isApproved;
  if (model.previous === "spec" && hasSpec) {
    takeStep(model, "implement");
    model.isApproved = true;
  } else {
    takeStep(model, model.previous!);
    model.isApproved = wasApproved;
  }
  return true;
}

function claimModel(model: TaskModel, session: string): boolean {
  const isOwned = model.loopStatus !== "complete" && (model.isOfLoop || model.isCurrent);
  if (isOwned || model.phase === "complete") return false;
  if (model.claimedBy !== null && model.claimedBy !== session) return false;
  model.claimedBy = session;
  return true;
}

function releaseModel(model: TaskModel): boolean {
  const isKept = model.loopStatus !== "complete" &&
    (model.isCurrent || (model.isOfLoop && model.loopStatus === "halted"));
  if (isKept && model.claimedBy === null) return false;
  model.claimedBy = null;
  if (!isKept) model.isOfLoop = false;
  return true;
}

const dirOf = (scratch: Scratch, { phase }: TaskModel): string =>
  taskDir(scratch, phase === "complete" ? "complete/t" : "t");

/** Does an action to the task and the model; returns whether each accepted it. */
async function actOnTask(
  scratch: Scratch,
  model: TaskModel,
  action: TaskAction,
): Promise<[program: boolean, model: boolean]> {
  const dir = dirOf(scratch, model);
  const status = async (...args: string[]) => await call(scratch, [...args, "--task=t"]) === 0;
  switch (action.do) {
    case "write":
    case "blank": {
      const name = action.document === "own" ? documentOf(model.phase) : action.document;
      if (name === undefined) return [true, true];
      Deno.writeTextFileSync(join(dir, `${name}.md`), action.do === "write" ? "x" : " \n\0");
      if (action.do === "write") model.written.add(name);
      else model.written.delete(name);
      return [true, true];
    }
    case "own": {
      const { isOfLoop, isCurrent, status } = action;
      Object.assign(model, { isOfLoop, isCurrent, loopStatus: status });
      writeOwner(scratch, model);
      return [true, true];
    }
    case "move": {
      const next = PIPELINE[PIPELINE.indexOf(model.phase) + 1] ?? "complete";
      const to = action.to === "next" ? next : action.to;
      const reason = action.hasReason ? ["--reason=because"] : [];
      const isMoved = await status(`--transition=${to}`, ...reason);
      return [isMoved, moveModel(model, to, action.hasReason)];
    }
    case "approve":
      return [await status("--approve"), approveModel(model)];
    case "claim":
      return [
        await status("--claim", `--session=${action.session}`),
        claimModel(model, action.session),
      ];
    case "release":
      return [await status("--release"), releaseModel(model)];
  }
}

/** Writes what ticks would have left: the task's owner, and the loop's state and current task. */
function writeOwner(scratch: Scratch, model: TaskModel): void {
  const path = join(dirOf(scratch, model), ".state");
  const task = { ...readJson(path), loop: model.isOfLoop ? "owner" : null };
  Deno.writeTextFileSync(path, JSON.stringify(task));
  writeLoop(scratch, "owner", {}, {
    status: model.loopStatus,
    halt_reason: model.loopStatus === "halted" ? "human_intervention" : null,
    current_task: model.isCurrent ? "t" : null,
  });
}

/** Throws unless the task's state says what the model says. */
function compareTask(scratch: Scratch, model: TaskModel, told: string): void {
  const state = readJson(join(dirOf(scratch, model), ".state"));
  const { phase, previous_phase, approved_at, claimed_by, loop, history } = state;
  assertEquals(
    {
      phase,
      previous: previous_phase,
      isApproved: approved_at !== null,
      claimedBy: claimed_by,
      isOfLoop: loop === "owner",
      steps: (history as unknown[]).length,
    },
    {
      phase: model.phase,
      previous: model.previous,
      isApproved: model.isApproved,
      claimedBy: model.claimedBy,
      isOfLoop: model.isOfLoop,
      steps: model.steps,
    },
    told,
  );
}

/** Every step of the pipeline: on, back to rework, to a person, and back again. */
const EDGES = [
  ...PIPELINE.slice(1).map((to, index) => `${PIPELINE[index]} ${to}`),
  "code_review implement",
  "bug_hunt implement",
  ...PIPELINE.map((from) => `${from} ${WAITING}`),
  ...PIPELINE.slice(0, -1).map((to) => `${WAITING} ${to}`),
];

Deno.test("a task goes through its phases exactly as a small model of the pipeline does", async () => {
  const taken = new Set<string>();
  await walk(
    fc.asyncProperty(fc.nat(6), fc.array(taskAction, LONG), async (start, actions) => {
      using scratch = makeScratch();
      // Late phases are far away: some tasks have come there already.
      if (start > 0) writeTask(scratch, "t", PIPELINE[start]);
      else await call(scratch, ["--create-task=t"]);
      const model: TaskModel = {
        phase: PIPELINE[start]!,
        previous: PIPELINE[start - 1] ?? null,
        isApproved: start >= 3,
        claimedBy: null,
        steps: start + 1,
        written: new Set(DOCUMENTS.slice(0, start)),
        isOfLoop: false,
        isCurrent: false,
        loopStatus: "complete",
      };
      for (const action of actions) {
        const before = model.phase;
        const told = `${JSON.stringify(action)} on ${JSON.stringify(model)}, with ${[
          ...model.written,
        ]}`;
        const [program, expected] = await actOnTask(scratch, model, action);
        assertEquals(program, expected, told);
        if (model.phase !== before) taken.add(`${before} ${model.phase}`);
        compareTask(scratch, model, told);
      }
    }),
    EDGES,
    taken,
  );
});

// Loops

/** What a person would keep on paper about one loop: its whole state, and a request to pause. */
interface LoopModel {
  readonly state: Record<string, unknown> & {
    status: typeof LOOP_STATUSES[number];
    halt_reason: string | null;
    iteration_count: number;
    iteration_base: number;
    resumed_count: number;
    score_history: number[];
    pass_history: boolean[];
    consecutive_failures: number;
  };
  isPauseWanted: boolean;
}

const HALTS = ["verifier_failed", "drift_detected", "human_intervention"] as const;
const LIMIT = 3;

const loopAction = fc.oneof(
  {
    arbitrary: fc.constantFrom("pause", "resume", "approve", "gate", "ask", "request"),
    weight: 6,
  },
  { arbitrary: fc.constantFrom("gate", "gate", "tick", "tick", "fail"), weight: 6 },
  { arbitrary: fc.constantFrom("approve", ...HALTS), weight: 3 },
  { arbitrary: fc.constant("complete"), weight: 1 },
);

const isOver = ({ state }: LoopModel): boolean =>
  state.status === "halted" || state.status === "complete";

/** Does an action to the model; false where it is refused. */
function actOnModel(model: LoopModel, action: string): boolean {
  const { state } = model;
  switch (action) {
    case "ask":
      return true;
    case "gate":
      if (state.status === "running" && model.isPauseWanted) {
        state.status = "paused";
        model.isPauseWanted = false;
      }
      if (state.status === "running" && state.iteration_count - state.iteration_base >= LIMIT) {
        Object.assign(state, { status: "halted", halt_reason: "iterations_exhausted" });
      }
      return true;
    case "approve":
      if (state.status !== "halted") return false;
      model.isPauseWanted = false;
      Object.assign(state, {
        status: "running",
        halt_reason: null,
        iteration_base: state.iteration_count,
        resumed_count: state.resumed_count + 1,
        last_verdict: null,
        score_history: [],
        pass_history: [],
        consecutive_failures: 0,
        not_before: null,
      });
      return true;
    case "pause":
    case "resume":
      if (isOver(model)) return false;
      model.isPauseWanted = false;
      state.status = action === "pause" ? "paused" : "running";
      return true;
    default:
      if (state.status === "complete") return false;
      if (state.status === "running" || state.status === "paused") {
        Object.assign(state, { status: "halted", halt_reason: action });
      }
      return true;
  }
}

/** Does to the model what a tick saves; ticks themselves are too slow for so many. False: no tick. */
function tickModel({ state }: LoopModel, action: string): boolean {
  if (state.status !== "running" || state.iteration_count - state.iteration_base >= LIMIT) {
    return false;
  }
  const hasFailed = action === "fail";
  state.iteration_count++;
  state.score_history.push(hasFailed ? 0 : 0.5);
  state.pass_history.push(!hasFailed);
  state.consecutive_failures = hasFailed ? state.consecutive_failures + 1 : 0;
  Object.assign(state, {
    last_verdict: { pass: !hasFailed, score: hasFailed ? 0 : 0.5, reasons: ["seen"] },
    not_before: hasFailed ? "2100-01-01T00:00:00Z" : null,
  });
  if (action === "complete") state.status = "complete";
  return true;
}

function loopCommand(action: string): string[] {
  if (action === "pause" || action === "resume") return [`--${action}-loop=night`];
  if (action === "approve") return ["--approve", "--loop=night"];
  if (action === "gate") return ["--check-gate=night"];
  if (action === "ask") return ["--can-continue=night", "--json"];
  return ["--halt-loop=night", `--reason=${action}`];
}

/** What `--can-continue` has to answer. */
function answerOf({ state, isPauseWanted }: LoopModel): Record<string, unknown> {
  const { status, halt_reason, iteration_count, resumed_count } = state;
  const word = status === "running" ? isPauseWanted ? "PAUSED" : "OK" : status.toUpperCase();
  return {
    schema_version: 1,
    state: word,
    loop: "night",
    halt_reason,
    iteration_count,
    resumed_count,
  };
}

/** Every change of a loop's status, and why. */
const LOOP_EDGES = [
  "running paused pause",
  "running paused gate",
  "paused running resume",
  "halted running approve",
  "running halted gate",
  "running complete complete",
  ...HALTS.flatMap((reason) => [`running halted ${reason}`, `paused halted ${reason}`]),
];

Deno.test("a loop goes from state to state exactly as a small model of its brakes does", async () => {
  const taken = new Set<string>();
  await walk(
    fc.asyncProperty(fc.array(loopAction, LONG), async (actions) => {
      using scratch = makeScratch();
      const brakes = { max_iterations: LIMIT, score_plateau_window: 1000 };
      const dir = writeLoop(scratch, "night", { brakes }, {
        iteration_base: 0,
        pass_history: [],
        consecutive_failures: 0,
        not_before: null,
        of_another_edition: { kept: true },
      });
      const [path, request] = [join(dir, ".state.loop"), join(dir, "pause.request")];
      const model: LoopModel = {
        state: readJson(path) as LoopModel["state"],
        isPauseWanted: false,
      };
      for (const action of actions) {
        const told = `${action} on ${JSON.stringify(model)}`;
        const before = model.state.status;
        if (action === "request") {
          // As a person's --pause-loop leaves it while a tick is at work.
          if (isOver(model)) continue;
          Deno.writeTextFileSync(request, "{}");
          model.isPauseWanted = true;
        } else if (["tick", "fail", "complete"].includes(action)) {
          if (!tickModel(model, action)) continue;
          Deno.writeTextFileSync(path, JSON.stringify(model.state));
        } else {
          const code = await call(scratch, loopCommand(action));
          assertEquals(code === 0, actOnModel(model, action), told);
          if (action === "ask") assertEquals(JSON.parse(answer), answerOf(model), told);
        }
        assertEquals(readJson(path), model.state, told);
        assertEquals(existsSync(request), model.isPauseWanted, told);
        if (before !== model.state.status) taken.add(`${before} ${model.state.status} ${action}`);
      }
    }),
    LOOP_EDGES,
    taken,
  );
});

// Texts

const tokenName = fc.constantFrom("{a}", "{b}", "{ab}", "{prompt}", "{.*}", "{$&}", "{\\}");
const tokenText = fc.array(
  fc.oneof(tokenName, fc.constantFrom("{", "}", "$&", "$1", "$$", "\\", "\n"), fc.string()),
  { maxLength: 12 },
).map((parts) => parts.join(""));

Deno.test("substituteTokens() replaces each token once, from left to right, and nothing else", () => {
  const values = fc.dictionary(tokenName, tokenText, { noNullPrototype: true });
  fc.assert(
    fc.property(tokenText, values, (template, given) => {
      let [expected, rest] = ["", template];
      while (rest !== "") {
        const token = Object.keys(given).filter((each) => rest.startsWith(each))
          .sort((a, b) => b.length - a.length)[0];
        expected += token === undefined ? rest[0] : given[token];
        rest = rest.slice(token?.length ?? 1);
      }
      assertEquals(substituteTokens(template, given), expected);
    }),
    RUNS,
  );
});

const anyText = fc.string({ unit: "grapheme", maxLength: 200 });

Deno.test("truncateTokens() keeps what fits, and the start of what does not, in whole characters", () => {
  const mark = " …[truncated]";
  fc.assert(
    fc.property(anyText, fc.nat(60), (text, tokens) => {
      const cut = truncateTokens(text, tokens);
      if (text.length <= tokens * 4) return assertEquals(cut, text);
      assert(cut.endsWith(mark), cut);
      const kept = cut.slice(0, -mark.length);
      assert(text.startsWith(kept), cut);
      assert(kept.length <= tokens * 4 && kept.length >= tokens * 4 - 1, cut);
      assert(kept.isWellFormed() || !text.isWellFormed(), cut);
    }),
    RUNS,
  );
});

Deno.test("fillPrompt() fits every prompt whose fixed text fits, and shortens only what may be short", () => {
  const long = fc.string({ unit: "grapheme", maxLength: 4000 });
  fc.assert(
    fc.property(
      long,
      long,
      anyText,
      fc.integer({ min: 200, max: 3000 }),
      (work, diff, hint, max) => {
        const template =
          "# Work\n{artifact_content}\n# Diff\n{diff}\n# Hint\n{next_hint}\n# End {unknown}";
        const values = { "{artifact_content}": work, "{diff}": diff, "{next_hint}": hint };
        const prompt = fillPrompt(template, values, max);
        assert(prompt.length <= max * 4, `${prompt.length} of ${max * 4}`);
        assert(prompt.endsWith(`\n# Hint\n${hint}\n# End {unknown}`), prompt);
        const whole = substituteTokens(template, values);
        if (whole.length <= max * 4) assertEquals(prompt, whole);
        else assert(prompt.includes("[truncated]"), prompt);
      },
    ),
    RUNS,
  );
});

Deno.test("quoteForSh() gives sh back every word as it was", async () => {
  using scratch = makeScratch();
  const word = fc.string({ unit: "binary", minLength: 1 }).filter((text) =>
    !text.includes("\0") && text.isWellFormed()
  );
  const nasty = fc.constantFrom(
    "",
    "'",
    "''",
    "$(id)",
    "`id`",
    "\\",
    "-n",
    "a\nb",
    "*",
    "~",
    "#",
    "!",
  );
  await fc.assert(
    fc.asyncProperty(fc.array(fc.oneof(word, nasty), { minLength: 1 }), async (words) => {
      const script = `for word in ${quoteForSh(words)}; do printf '%s\\n.\\n' "$word"; done`;
      const { stdout } = await run(scratch, ["sh", "-c", script]);
      assertEquals(stdout, words.map((each) => `${each}\n.\n`).join(""));
    }),
    FEW_RUNS,
  );
});

Deno.test("slugify() makes names of tasks, or none, and a backlog lists only such", () => {
  fc.assert(
    fc.property(fc.string({ unit: "grapheme" }), (text) => {
      const name = slugify(text);
      if (name === null) assertEquals(text.normalize("NFKD").replace(/[^a-zA-Z0-9]/g, ""), "");
      else assert(NAME_PATTERN.test(name), name);
      for (const item of listBacklogItems(`- [ ] ${text}\n- [x] ${text}\n* [ ] **b** ${text}`)) {
        assert(item.name === null || NAME_PATTERN.test(item.name), `${item.name}`);
      }
    }),
    RUNS,
  );
});

/**
 * Properties that hold for any input: the steps of tasks and the states of loops against small models
 * that know nothing of the programs, and the texts that go into prompts and command lines.
 */
import { assert, assertEquals } from "@std/assert";
import { join } from "@std/path";
import { fc, THOROUGHNESS } from "../deps.ts";
import {
  loopDir,
  makeScratch,
  readJson,
  run,
  type Scratch,
  taskDir,
  writeLoop,
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

const RUNS = { numRuns: 500 * THOROUGHNESS };
/** For properties that start programs or write files. */
const FEW_RUNS = { ...RUNS, numRuns: RUNS.numRuns / 25 };

/** Runs a command line of status within this process: hundreds a second instead of ten. */
async function call(scratch: Scratch, args: readonly string[]): Promise<number> {
  const { log, error } = console;
  console.log = console.error = () => {};
  try {
    return await runStatus([...args, `--project=${scratch.project}`]);
  } finally {
    Object.assign(console, { log, error });
  }
}

// Tasks

const PIPELINE = ["research", "design", "spec", "implement", "code_review", "bug_hunt", "complete"];
const DOCUMENTS = ["RESEARCH", "DESIGN", "SPEC", "IMPLEMENTATION", "CODE_REVIEW", "BUG_REPORT"];
const WAITING = "human_intervention";

/** What a person would keep on paper about one task. */
interface TaskModel {
  phase: string;
  previous: string | null;
  isApproved: boolean;
  claimedBy: string | null;
  steps: number;
  readonly written: Set<string>;
}

type TaskAction =
  | { readonly do: "write" | "blank"; readonly index: number }
  | { readonly do: "move"; readonly to: string; readonly hasReason: boolean }
  | { readonly do: "approve" }
  | { readonly do: "claim"; readonly session: string }
  | { readonly do: "release" };

const taskAction: fc.Arbitrary<TaskAction> = fc.oneof(
  { arbitrary: fc.record({ do: fc.constant("write" as const), index: fc.nat(5) }), weight: 3 },
  { arbitrary: fc.record({ do: fc.constant("blank" as const), index: fc.nat(5) }), weight: 1 },
  {
    arbitrary: fc.record({
      do: fc.constant("move" as const),
      to: fc.constantFrom(...PIPELINE, WAITING),
      hasReason: fc.boolean(),
    }),
    weight: 6,
  },
  // The next phase far more often than chance would have it, so that tasks get somewhere.
  {
    arbitrary: fc.record({
      do: fc.constant("move" as const),
      to: fc.constant("next"),
      hasReason: fc.boolean(),
    }),
    weight: 6,
  },
  { arbitrary: fc.constant({ do: "approve" as const }), weight: 3 },
  {
    arbitrary: fc.record({ do: fc.constant("claim" as const), session: fc.constantFrom("a", "b") }),
    weight: 1,
  },
  { arbitrary: fc.constant({ do: "release" as const }), weight: 1 },
);

const documentOf = (phase: string): string => `${DOCUMENTS[PIPELINE.indexOf(phase)]}.md`;

/** Moves the model; false where the pipeline refuses. */
function moveModel(model: TaskModel, to: string, hasReason: boolean): boolean {
  const [here, there] = [PIPELINE.indexOf(model.phase), PIPELINE.indexOf(to)];
  if (model.phase === WAITING || to === model.phase) return false;
  if (to === WAITING) {
    if (!hasReason) return false;
  } else if (there < here) {
    const isRework = to === "implement" && ["code_review", "bug_hunt"].includes(model.phase);
    if (!isRework && !hasReason) return false;
  } else {
    if (there !== here + 1 || !model.written.has(documentOf(model.phase))) return false;
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
}

function approveModel(model: TaskModel): boolean {
  const hasSpec = model.written.has("SPEC.md");
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

/** Does an action to the task and the model; returns whether each accepted it. */
async function actOnTask(
  scratch: Scratch,
  model: TaskModel,
  action: TaskAction,
): Promise<[program: boolean, model: boolean]> {
  const dir = taskDir(scratch, model.phase === "complete" ? "complete/t" : "t");
  if (action.do === "write" || action.do === "blank") {
    const name = `${DOCUMENTS[action.index]}.md`;
    Deno.writeTextFileSync(join(dir, name), action.do === "write" ? "x" : " \n\0");
    if (action.do === "write") model.written.add(name);
    else model.written.delete(name);
    return [true, true];
  }
  if (action.do === "move") {
    const next = PIPELINE[PIPELINE.indexOf(model.phase) + 1] ?? "complete";
    const to = action.to === "next" ? next : action.to;
    const reason = action.hasReason ? ["--reason=because"] : [];
    const code = await call(scratch, [`--transition=${to}`, "--task=t", ...reason]);
    return [code === 0, moveModel(model, to, action.hasReason)];
  }
  if (action.do === "approve") {
    const code = await call(scratch, ["--approve", "--task=t"]);
    return [code === 0, approveModel(model)];
  }
  if (action.do === "claim") {
    const code = await call(scratch, ["--claim", "--task=t", `--session=${action.session}`]);
    const isFree = model.phase !== "complete" && [null, action.session].includes(model.claimedBy);
    if (isFree) model.claimedBy = action.session;
    return [code === 0, isFree];
  }
  model.claimedBy = null;
  return [await call(scratch, ["--release", "--task=t"]) === 0, true];
}

Deno.test("a task goes through its phases exactly as a small model of the pipeline does", async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(taskAction, { minLength: 5, maxLength: 40 }), async (actions) => {
      using scratch = makeScratch();
      await call(scratch, ["--create-task=t"]);
      const model: TaskModel = {
        phase: "research",
        previous: null,
        isApproved: false,
        claimedBy: null,
        steps: 1,
        written: new Set(),
      };
      for (const action of actions) {
        const before = JSON.stringify(model);
        const [program, expected] = await actOnTask(scratch, model, action);
        const told = `${JSON.stringify(action)} on ${before}`;
        assertEquals(program, expected, told);
        const dir = taskDir(scratch, model.phase === "complete" ? "complete/t" : "t");
        const state = readJson(join(dir, ".state"));
        assertEquals(
          [
            state.phase,
            state.previous_phase,
            state.approved_at !== null,
            state.claimed_by,
            (state.history as unknown[]).length,
          ],
          [model.phase, model.previous, model.isApproved, model.claimedBy, model.steps],
          told,
        );
      }
    }),
    FEW_RUNS,
  );
});

// Loops

/** What a person would keep on paper about one loop. */
interface LoopModel {
  status: "running" | "paused" | "halted" | "complete";
  haltReason: string | null;
  count: number;
  base: number;
  resumed: number;
}

const HALTS = ["verifier_failed", "drift_detected", "human_intervention"] as const;
const LIMIT = 3;

const loopAction = fc.oneof(
  fc.constantFrom("pause", "resume", "approve", "gate", "gate", "ask", "tick", "tick"),
  fc.constantFrom(...HALTS),
  fc.constant("complete"),
);

/** Does an action to the model; false where it is refused. */
function actOnModel(model: LoopModel, action: string): boolean {
  const isOver = model.status === "halted" || model.status === "complete";
  const isHalt = HALTS.some((reason) => reason === action);
  if (action === "ask") return true;
  if (action === "gate") {
    if (model.status === "running" && model.count - model.base >= LIMIT) {
      Object.assign(model, { status: "halted", haltReason: "iterations_exhausted" });
    }
  } else if (action === "approve") {
    if (model.status !== "halted") return false;
    Object.assign(model, { status: "running", haltReason: null, base: model.count });
    model.resumed++;
  } else if (isHalt) {
    if (model.status === "complete") return false;
    if (model.status !== "halted") Object.assign(model, { status: "halted", haltReason: action });
  } else {
    if (isOver) return false;
    model.status = action === "pause" ? "paused" : "running";
  }
  return true;
}

function loopCommand(action: string): string[] {
  if (action === "pause" || action === "resume") return [`--${action}-loop=night`];
  if (action === "approve") return ["--approve", "--loop=night"];
  if (action === "gate") return ["--check-gate=night"];
  if (action === "ask") return ["--can-continue=night"];
  return ["--halt-loop=night", `--reason=${action}`];
}

Deno.test("a loop goes from state to state exactly as a small model of its brakes does", async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(loopAction, { minLength: 3, maxLength: 30 }), async (actions) => {
      using scratch = makeScratch();
      writeLoop(scratch, "night", { brakes: { max_iterations: LIMIT } });
      const path = join(loopDir(scratch, "night"), ".state.loop");
      const model: LoopModel = {
        status: "running",
        haltReason: null,
        count: 0,
        base: 0,
        resumed: 0,
      };
      for (const action of actions) {
        const told = `${action} on ${JSON.stringify(model)}`;
        if (action === "tick" || action === "complete") {
          // What a tick would save; ticks themselves are too slow for so many.
          if (model.status !== "running" || model.count - model.base >= LIMIT) continue;
          model.count++;
          if (action === "complete") model.status = "complete";
          const saved = { ...readJson(path), iteration_count: model.count, status: model.status };
          Deno.writeTextFileSync(path, JSON.stringify(saved));
          continue;
        }
        const code = await call(scratch, loopCommand(action));
        assertEquals(code === 0, actOnModel(model, action), told);
        const state = readJson(path);
        assertEquals(
          [
            state.status,
            state.halt_reason,
            state.iteration_count,
            state.iteration_base ?? 0,
            state.resumed_count,
          ],
          [model.status, model.haltReason, model.count, model.base, model.resumed],
          told,
        );
      }
    }),
    FEW_RUNS,
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

/**
 * The gate at its edges, within this process: each brake on both sides of its limit, all answers, and the
 * order of the brakes. Quick enough to run for every mutant of the gate.
 */
import { assertEquals, assertMatch } from "@std/assert";
import { join } from "@std/path";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  readJson,
  readLog,
  type Scratch,
  writeFile,
  writeLoop,
  writeTask,
} from "../helpers.ts";
import { isInScope, isPlateau, runStatus } from "../../scripts/status.ts";

/** Runs a command of status and returns its last line of JSON, or its words and hint. */
async function ask(scratch: Scratch, args: readonly string[]): Promise<Record<string, unknown>> {
  const { log, error } = console;
  const said: string[] = [];
  console.log = (line: string) => said.push(line);
  console.error = (line: string) => said.push(line);
  let code = 1;
  try {
    code = await runStatus([...args, `--project=${scratch.project}`]);
  } finally {
    Object.assign(console, { log, error });
  }
  const line = said.findLast((each) => each.startsWith("{"));
  return { code, said: said.join("\n"), ...JSON.parse(line ?? "{}") };
}

const GATE = ["--check-gate=night", "--json"];

interface Case {
  readonly name: string;
  readonly config?: Record<string, unknown>;
  readonly state?: Record<string, unknown>;
  readonly prepare?: (scratch: Scratch) => void;
  /** `ok`, or what stops the loop. */
  readonly reason: string;
  readonly more?: Record<string, unknown>;
  /** What the log says of the halt. */
  readonly detail?: string;
}

const cost = (text: string) => (scratch: Scratch): void =>
  writeFile(join(loopDir(scratch, "night"), "cost.json"), text);
const models = (file: unknown) => (scratch: Scratch): void =>
  writeFile(join(scratch.project, ".automaton/models.json"), JSON.stringify(file));
const flat = (scores: number[], passes: boolean[] = []): Record<string, unknown> => ({
  score_history: scores,
  pass_history: passes,
});
const roles = (implement: unknown, verify: unknown): Record<string, unknown> => ({
  roles: { implement, verify },
});
const two = { models: { a: {}, b: {} } };

const CASES: readonly Case[] = [
  {
    name: "a new loop",
    reason: "ok",
    more: { remaining_iterations: 10, remaining_budget_usd: null },
  },
  {
    name: "the last iteration",
    config: { brakes: { max_iterations: 4 } },
    state: { iteration_count: 3 },
    reason: "ok",
    more: {
      remaining_iterations: 1,
      halt_reason: null,
      task_phase: null,
      task_in_halt_loop: false,
    },
  },
  {
    name: "no iteration left",
    config: { brakes: { max_iterations: 4 } },
    state: { iteration_count: 4 },
    reason: "halted:iterations_exhausted",
    more: { remaining_iterations: 0, halt_reason: "iterations_exhausted" },
    detail: "4 iterations used",
  },
  {
    name: "more iterations than allowed",
    config: { brakes: { max_iterations: 4 } },
    state: { iteration_count: 9, iteration_base: 2 },
    reason: "halted:iterations_exhausted",
    more: { remaining_iterations: 0 },
    detail: "7 iterations used",
  },
  {
    name: "iterations since the approval",
    config: { brakes: { max_iterations: 4 } },
    state: { iteration_count: 9, iteration_base: 7 },
    reason: "ok",
    more: { remaining_iterations: 2 },
  },
  {
    name: "below the budget",
    config: { brakes: { max_budget_usd: 2 } },
    prepare: cost('{"total_usd": 1.5}'),
    reason: "ok",
    more: { remaining_budget_usd: 0.5 },
  },
  {
    name: "at the budget",
    config: { brakes: { max_budget_usd: 2 } },
    prepare: cost('{"total_usd": 2}'),
    reason: "halted:budget_exhausted",
    more: { remaining_budget_usd: 0 },
  },
  {
    name: "over the budget",
    config: { brakes: { max_budget_usd: 2 } },
    prepare: cost('{"total_usd": 3}'),
    reason: "halted:budget_exhausted",
    more: { remaining_budget_usd: 0 },
  },
  {
    name: "nothing spent yet",
    config: { brakes: { max_budget_usd: 2 } },
    reason: "ok",
    more: { remaining_budget_usd: 2 },
  },
  {
    name: "a budget of nothing with nothing known",
    config: { brakes: { max_budget_usd: 0 } },
    reason: "ok",
    more: { remaining_budget_usd: 0 },
  },
  {
    name: "local cost",
    config: { brakes: { max_budget_usd: 2 } },
    prepare: cost('{"total_usd": 3, "local": true}'),
    reason: "ok",
  },
  {
    name: "no budget",
    prepare: cost('{"total_usd": 3}'),
    reason: "ok",
    more: { remaining_budget_usd: null },
  },
  {
    name: "a task in a phase for work",
    state: { current_task: "one" },
    prepare: (scratch) => void writeTask(scratch, "one", "bug_hunt"),
    reason: "ok",
    more: { task_phase: "bug_hunt", task_in_halt_loop: false },
  },
  {
    name: "a task that waits for a person",
    state: { current_task: "one" },
    prepare: (scratch) => void writeTask(scratch, "one", "human_intervention"),
    reason: "halted:human_intervention",
    more: { task_phase: "human_intervention", task_in_halt_loop: true },
    detail: "task one is in human_intervention, where this loop may not work",
  },
  {
    name: "a task in a phase that this loop may not work in",
    config: { allowed_phases: ["research"] },
    state: { current_task: "one" },
    prepare: (scratch) => void writeTask(scratch, "one", "design"),
    reason: "halted:human_intervention",
  },
  {
    name: "a task in the only phase that this loop may work in",
    config: { allowed_phases: ["design"] },
    state: { current_task: "one" },
    prepare: (scratch) => void writeTask(scratch, "one", "design"),
    reason: "ok",
  },
  {
    name: "a task that is gone",
    state: { current_task: "one" },
    reason: "halted:human_intervention",
    more: { task_phase: null, task_in_halt_loop: false },
    detail: "task one cannot be read",
  },
  {
    name: "scores without a pass that are flat",
    state: flat([0.5, 0.5, 0.5]),
    reason: "halted:verifier_failed",
  },
  {
    name: "scores that fall",
    state: flat([0.9, 0.5, 0.4, 0.3]),
    reason: "halted:verifier_failed",
    detail: "no progress in 3 ticks: scores 0.5, 0.4, 0.3",
  },
  { name: "scores that rise once", state: flat([0.5, 0.4, 0.5]), reason: "ok" },
  { name: "too few scores", state: flat([0.5, 0.5]), reason: "ok" },
  { name: "flat with a pass", state: flat([0.5, 0.5, 0.5], [false, true, false]), reason: "ok" },
  {
    name: "an older pass",
    config: { brakes: { score_plateau_window: 2 } },
    state: flat([0.9, 0.5, 0.5], [true, false, false]),
    reason: "halted:verifier_failed",
  },
  {
    name: "a wider window",
    config: { brakes: { score_plateau_window: 4 } },
    state: flat([0.5, 0.5, 0.5]),
    reason: "ok",
  },
  {
    name: "one model for both",
    prepare: models({ ...two, default: "a" }),
    reason: "halted:human_intervention",
  },
  {
    name: "two models",
    config: roles({}, { model: "b" }),
    prepare: models({ ...two, default: "a" }),
    reason: "ok",
  },
  {
    name: "two models in conflict",
    config: roles({ model: "a" }, { model: "b" }),
    prepare: models({ ...two, conflicts: [["b", "a"]] }),
    reason: "halted:human_intervention",
  },
  {
    name: "two models, one of which is in conflict with a third",
    config: roles({ model: "a" }, { model: "b" }),
    prepare: models({ ...two, conflicts: [["a", "c"], ["c", "b"]] }),
    reason: "ok",
  },
  {
    name: "one model named twice",
    config: roles({ model: "b" }, { model: "b" }),
    prepare: models({ ...two, default: "a" }),
    reason: "halted:human_intervention",
  },
  {
    name: "no model named and two known",
    prepare: models(two),
    reason: "halted:human_intervention",
    detail: "implement (no model) and verify (no model) count as the same model",
  },
  { name: "one model known", prepare: models({ models: { a: {} }, default: "a" }), reason: "ok" },
  { name: "paused", state: { status: "paused", iteration_count: 99 }, reason: "paused" },
  { name: "complete", state: { status: "complete", iteration_count: 99 }, reason: "complete" },
  {
    name: "halted",
    state: { status: "halted", halt_reason: "drift_detected", iteration_count: 99 },
    reason: "halted:drift_detected",
    more: { halt_reason: "drift_detected", remaining_iterations: 0 },
  },
  {
    name: "paused in a backoff",
    state: { status: "paused", not_before: soon(60) },
    reason: "paused",
  },
  { name: "a backoff", state: { not_before: soon(60) }, reason: "backoff" },
  { name: "the end of a backoff", state: { not_before: soon(-1) }, reason: "ok" },
  { name: "a backoff of a clock gone wrong", state: { not_before: soon(5000) }, reason: "ok" },
  {
    name: "a backoff as long as this loop's",
    config: { harness: { backoff: { seconds: 6000 } } },
    state: { not_before: soon(5000) },
    reason: "backoff",
  },
  {
    name: "a brake in a backoff",
    state: { not_before: soon(60), iteration_count: 10 },
    reason: "halted:iterations_exhausted",
  },
];

function soon(seconds: number): string {
  return new Date(Date.now() + seconds * 1000).toISOString();
}

for (const { name, config, state, prepare, reason, more, detail } of CASES) {
  Deno.test(`the gate answers ${reason}: ${name}`, async () => {
    using scratch = makeScratch();
    const dir = writeLoop(scratch, "night", config, state);
    prepare?.(scratch);
    const before = readJson(join(dir, ".state.loop"));
    const foreseen = await ask(scratch, [...GATE, "--dry-run"]);
    assertEquals(readJson(join(dir, ".state.loop")), before, "a dry run changes nothing");
    const answer = await ask(scratch, GATE);
    assertEquals([foreseen.ok, foreseen.reason], [answer.ok, answer.reason]);
    assertEquals([answer.code, answer.ok, answer.reason], [0, reason === "ok", reason]);
    for (const [key, value] of Object.entries(more ?? {})) assertEquals(answer[key], value, key);
    const after = readJson(join(dir, ".state.loop"));
    const isTripped = reason.startsWith("halted:") && before.status === "running";
    const halt = isTripped ? { status: "halted", halt_reason: reason.slice(7) } : {};
    assertEquals(after, { ...before, ...halt });
    const logged = readLog(scratch, "night").find(({ event }) => event === "HALTED");
    assertEquals(logged?.halt_reason, isTripped ? reason.slice(7) : undefined);
    if (detail !== undefined) assertEquals(logged?.detail, detail);
    const { said } = await ask(scratch, ["--check-gate=night"]);
    assertEquals(`${said}`.includes("\nhint: "), reason !== "ok", `${said}`);
    assertEquals(`${said}`.includes("hint: wait until "), reason === "backoff", `${said}`);
  });
}

Deno.test("the brakes answer in their order, and the first that trips stops there", async () => {
  using scratch = makeScratch();
  makeRepository(scratch);
  const dir = writeLoop(scratch, "night", {
    brakes: { max_iterations: 1, max_budget_usd: 1 },
    blast_radius: { file_scope: ["src"] },
  }, { ...flat([0.1, 0.1, 0.1]), iteration_count: 1, current_task: "one" });
  git(scratch, scratch.project, "worktree", "add", "-q", "-b", "loop/night", join(dir, "worktree"));
  const set = (fields: Record<string, unknown>, config: Record<string, unknown> = {}) => {
    writeLoop(scratch, "night", { ...readJson(join(dir, "loop.json")), ...config }, {
      ...readJson(join(dir, ".state.loop")),
      status: "running",
      halt_reason: null,
      ...fields,
    });
  };
  writeFile(join(dir, "worktree", "evil"), "x");
  writeFile(join(dir, "worktree", "src", "good"), "x");
  cost('{"total_usd": 1}')(scratch);
  models({ ...two, default: "a" })(scratch);
  set({ worktree_path: join(dir, "worktree"), worktree_branch: "loop/night", base_branch: "main" });
  const reasons: unknown[] = [];
  const step = async (fix: () => void) => {
    const { reason, out_of_scope_files: files } = await ask(scratch, GATE);
    reasons.push(`${reason} ${files}`);
    set({});
    fix();
  };
  await step(() => set({ iteration_base: 1 }));
  await step(() => cost('{"total_usd": 0}')(scratch));
  await step(() => void writeTask(scratch, "one", "design"));
  await step(() => Deno.removeSync(join(dir, "worktree", "evil")));
  await step(() => set({ score_history: [0.1, 0.2, 0.2] }));
  await step(() => models({ models: { a: {} } })(scratch));
  await step(() => {});
  assertEquals(reasons, [
    "halted:iterations_exhausted ",
    "halted:budget_exhausted ",
    "halted:human_intervention ",
    "halted:drift_detected evil",
    "halted:verifier_failed ",
    "halted:human_intervention ",
    "ok ",
  ]);
});

Deno.test("a repository that git cannot read closes the gate, whatever is the matter with it", async (t) => {
  const config = { blast_radius: { file_scope: ["src"] } };
  const breaks: Readonly<Record<string, (own: string, shared: string) => void>> = {
    "a torn index": (own) => Deno.writeTextFileSync(join(own, "index"), "torn"),
    "an empty index": (own) => Deno.writeTextFileSync(join(own, "index"), ""),
    "an index of NULs": (own) => Deno.writeFileSync(join(own, "index"), new Uint8Array(200)),
    "torn settings": (_, shared) => Deno.writeTextFileSync(join(shared, "config"), "[core\n\tbare"),
    "settings of NULs": (_, shared) =>
      Deno.writeFileSync(join(shared, "config"), new Uint8Array(9)),
  };
  for (const [name, breakIt] of Object.entries(breaks)) {
    await t.step(name, async () => {
      using scratch = makeScratch();
      makeRepository(scratch);
      const worktree = join(loopDir(scratch, "night"), "worktree");
      const dir = writeLoop(scratch, "night", config, { worktree_path: worktree });
      git(scratch, scratch.project, "worktree", "add", "-q", "-b", "loop/night", worktree);
      const before = readJson(join(dir, ".state.loop"));
      const [own, shared] = ["--absolute-git-dir", "--git-common-dir"].map((flag) =>
        git(scratch, worktree, "rev-parse", "--path-format=absolute", flag)
      );
      breakIt(own!, shared!);
      // A gate that cannot answer ends with 1, which a tick calls gate_failed.
      const { code, ok, said } = await ask(scratch, GATE);
      assertEquals([code, ok ?? false], [1, false], `${said}`);
      assertMatch(`${said}`, /Cannot run git .*(index|bad config)/);
      assertEquals(readJson(join(dir, ".state.loop")), before);
    });
  }
});

Deno.test("a trip lists the first five files and how many more there are", async () => {
  using scratch = makeScratch();
  makeRepository(scratch);
  const dir = writeLoop(scratch, "night", { blast_radius: { file_scope: [] } });
  git(scratch, scratch.project, "worktree", "add", "-q", "-b", "loop/night", join(dir, "worktree"));
  for (const count of [5, 6]) {
    for (let index = 0; index < count; index++) writeFile(join(dir, "worktree", `f${index}`), "x");
    writeLoop(scratch, "night", { blast_radius: { file_scope: [] } }, {
      worktree_path: join(dir, "worktree"),
    });
    const { said } = await ask(scratch, ["--check-gate=night"]);
    const listed = '"f0", "f1", "f2", "f3", "f4"' + (count === 6 ? " and 1 more" : "");
    assertEquals(`${said}`.includes(`file scope: ${listed})`), true, `${said}`);
  }
});

Deno.test("isPlateau() and isInScope() at their edges", () => {
  const plateaus = [
    isPlateau([], [], 2),
    isPlateau([0.5, 0.5], [], 2),
    isPlateau([0.5, 0.6], [], 2),
    isPlateau([0.6, 0.5], [], 2),
    isPlateau([0.1, 0.6, 0.5], [], 2),
    isPlateau([0.5, 0.5], [true, false], 2),
    isPlateau([0.5, 0.5], [true, false, false], 2),
    isPlateau([0.5], [], 2),
  ];
  assertEquals(plateaus, [false, true, false, true, true, false, true, false]);
  const scopes = [
    isInScope("a", undefined),
    isInScope("a", []),
    isInScope("a", ["."]),
    isInScope("a", ["./"]),
    isInScope("a/b", ["a"]),
    isInScope("a/b", ["a/"]),
    isInScope("a/b", ["./a"]),
    isInScope("a/b/c", ["a\\b"]),
    isInScope("a", ["a"]),
    isInScope("ab", ["a"]),
    isInScope("b/a", ["a"]),
    isInScope("a", ["a/b"]),
    isInScope("c", ["a", "c"]),
  ];
  const expected = [
    true,
    false,
    true,
    true,
    true,
    true,
    true,
    true,
    true,
    false,
    false,
    false,
    true,
  ];
  assertEquals(scopes, expected);
});

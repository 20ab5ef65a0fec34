/** status: the gate before each tick, and the halts that it makes. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { isInScope, isPlateau } from "../scripts/status.ts";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  readJson,
  readLog,
  type Scratch,
  snapshot,
  taskDir,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";
import { accept, type Json, refuse, status } from "./status_support.ts";

const GATE = ["--check-gate=night"];

function state(scratch: Scratch): Json {
  return readJson(join(loopDir(scratch, "night"), ".state.loop"));
}

function writeModels(scratch: Scratch, models: Json): void {
  writeFile(join(scratch.project, ".automaton/models.json"), JSON.stringify(models));
}

/** A repository with a loop's worktree in it, made as a tick makes it; returns the worktree. */
function makeWorktree(scratch: Scratch, scope: readonly string[] | null = ["src/"]): string {
  makeRepository(scratch, scratch.project, {
    "README.md": "a project\n",
    "src/a.ts": "a\n",
    "src/b.ts": "b\n",
    ".gitignore": ".automaton/\n",
  });
  const worktree = join(loopDir(scratch, "night"), "worktree");
  git(scratch, scratch.project, "worktree", "add", "--quiet", worktree, "-b", "loop/night");
  writeLoop(scratch, "night", scope === null ? {} : { blast_radius: { file_scope: scope } }, {
    worktree_path: worktree,
    worktree_branch: "loop/night",
    base_branch: "main",
    base_commit: git(scratch, scratch.project, "rev-parse", "HEAD"),
  });
  return worktree;
}

Deno.test("a loop with nothing against it passes the gate, and nothing changes", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night", { brakes: { max_iterations: 7, max_budget_usd: 5 } }, {
    iteration_count: 3,
    current_task: "one",
  });
  writeTask(scratch, "one", "implement");
  const before = snapshot(dir, [".state.lock"]);
  assertEquals(await accept(scratch, GATE), {
    schema_version: 1,
    ok: true,
    reason: "ok",
    halt_reason: null,
    remaining_iterations: 4,
    remaining_budget_usd: 5,
    task_phase: "implement",
    task_in_halt_loop: false,
    out_of_scope_files: [],
  });
  assertEquals(snapshot(dir, [".state.lock"]), before);
  assertEquals(await status(scratch, GATE), {
    code: 0,
    signal: null,
    stdout: "ok: 4 iterations left\n",
    stderr: "",
  });
});

/** A loop that each of the seven checks would stop; `fix` takes the first of them away. */
const CHECKS: readonly {
  readonly name: string;
  readonly reason: string;
  readonly detail: RegExp;
  readonly fix: (scratch: Scratch) => void;
}[] = [
  {
    name: "1 status",
    reason: "paused",
    detail: /^$/,
    fix: (scratch) => change(scratch, { status: "running" }),
  },
  {
    name: "2 iterations",
    reason: "halted:iterations_exhausted",
    detail: /^4 iterations used$/,
    fix: (scratch) => change(scratch, { status: "running", iteration_count: 5 }),
  },
  {
    name: "3 budget",
    reason: "halted:budget_exhausted",
    detail: /^2.5 of 2 USD spent$/,
    fix: (scratch) => {
      change(scratch, { status: "running" });
      writeFile(join(loopDir(scratch, "night"), "cost.json"), '{"total_usd": 1.5}');
    },
  },
  {
    name: "4 phase of the task",
    reason: "halted:human_intervention",
    detail: /^task one is in human_intervention, where this loop may not work$/,
    fix: (scratch) => {
      change(scratch, { status: "running" });
      writeTask(scratch, "one", "implement");
    },
  },
  {
    name: "5 drift",
    reason: "halted:drift_detected",
    detail: /^changed outside the file scope: "README.md"$/,
    fix: (scratch) => {
      change(scratch, { status: "running" });
      git(scratch, join(loopDir(scratch, "night"), "worktree"), "checkout", "--", ".");
    },
  },
  {
    name: "6 plateau",
    reason: "halted:verifier_failed",
    detail: /^no progress in 3 ticks: scores 0.4, 0.4, 0.3$/,
    fix: (scratch) => change(scratch, { status: "running", score_history: [0.3, 0.4, 0.3] }),
  },
  {
    name: "7 models",
    reason: "halted:human_intervention",
    detail: /^implement \(a\) and verify \(a\) count as the same model$/,
    fix: (scratch) => {
      change(scratch, { status: "running" });
      writeModels(scratch, { models: { a: {} } });
    },
  },
];

function change(scratch: Scratch, fields: Json): void {
  const halt = fields.status === "running" ? { halt_reason: null } : {};
  writeLoop(scratch, "night", readJson(join(loopDir(scratch, "night"), "loop.json")), {
    ...state(scratch),
    ...halt,
    ...fields,
  });
}

Deno.test("of the seven checks the first that fails answers, halts the loop and logs it", async (t) => {
  using scratch = makeScratch();
  const worktree = makeWorktree(scratch);
  writeFile(join(worktree, "README.md"), "changed\n");
  writeTask(scratch, "one", "human_intervention");
  writeFile(join(loopDir(scratch, "night"), "cost.json"), '{"total_usd": 2.5}');
  writeModels(scratch, { default: "a", models: { a: {}, b: {} } });
  writeLoop(scratch, "night", {
    brakes: { max_iterations: 4, max_budget_usd: 2 },
    blast_radius: { file_scope: ["src"] },
  }, {
    ...state(scratch),
    status: "paused",
    iteration_count: 6,
    iteration_base: 2,
    score_history: [0.4, 0.4, 0.3],
    pass_history: [false, false, false],
    current_task: "one",
  });
  const changed = [".state.loop", ".state.loop.bak", ".state.log", ".state.lock"]
    .map((name) => `.automaton/loops/night/${name}`);
  for (const [index, { name, reason, detail, fix }] of CHECKS.entries()) {
    await t.step(name, async () => {
      const [rest, stateBefore] = [snapshot(scratch.project, changed), state(scratch)];
      const logged = readLog(scratch, "night").length;
      const answer = await accept(scratch, GATE);
      assertEquals([answer.ok, answer.reason], [false, reason]);
      if (index === 0) {
        assertEquals([answer.halt_reason, state(scratch)], [null, stateBefore]);
        assertEquals(readLog(scratch, "night").length, logged);
      } else {
        const halt_reason = reason.split(":")[1];
        assertEquals(answer.halt_reason, halt_reason);
        assertEquals(state(scratch), { ...stateBefore, status: "halted", halt_reason });
        const [line, ...more] = readLog(scratch, "night").slice(logged);
        assertEquals(more, []);
        assertEquals([line?.event, line?.level, line?.halt_reason], [
          "HALTED",
          "WARNING",
          halt_reason,
        ]);
        assertMatch(`${line?.detail}`, detail);
        assertEquals(answer.task_in_halt_loop, true);
      }
      assertEquals(snapshot(scratch.project, changed), rest, "nothing else has changed");
      assertEquals(answer.out_of_scope_files, name === "5 drift" ? ["README.md"] : []);
      if (index > 0) {
        const again = await accept(scratch, GATE);
        assertEquals([again.ok, again.reason], [false, reason], "a halt stays");
        assertEquals(readLog(scratch, "night").length, logged + 1, "and is logged once");
      }
    });
    fix(scratch);
  }
  await t.step("and with all of them put right it passes", async () => {
    const answer = await accept(scratch, GATE);
    assertEquals([answer.ok, answer.reason], [true, "ok"]);
  });
});

/** A time within the wait that a rate limit sets. */
const soon = (): string => new Date(Date.now() + 600_000).toISOString();

Deno.test("a gate that says no tells a person why and what to do", async (t) => {
  using scratch = makeScratch();
  const cases = [
    ["running", { iteration_count: 10 }, /^not ok: halted:iterations_exhausted \(10 iter/, /--ap/],
    ["halted", { halt_reason: "verifier_failed" }, /^not ok: halted:verifier_failed$/, /--approve/],
    ["paused", {}, /^not ok: paused$/, /status --resume-loop night/],
    ["complete", {}, /^not ok: complete$/, /status --loop-log night/],
    ["running", { not_before: soon() }, /^not ok: backoff$/, /until \d{4}-\d\d-\d\dT/],
  ] as const;
  for (const [name, fields, words, hint] of cases) {
    await t.step(`${name} ${Object.keys(fields)}`, async () => {
      writeLoop(scratch, "night", {}, { status: name, ...fields });
      const { code, stdout, stderr } = await status(scratch, GATE);
      assertEquals(code, 0);
      assertMatch(stdout.trimEnd(), words);
      assertMatch(stderr, /^hint: .*\n$/);
      assertMatch(stderr, hint);
    });
  }
});

Deno.test("back-off holds a tick up without a halt, until its time has come", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night", {}, { not_before: soon() });
  const before = snapshot(dir, [".state.lock"]);
  const { ok, reason, halt_reason } = await accept(scratch, GATE);
  assertEquals([ok, reason, halt_reason], [false, "backoff", null]);
  assertEquals(snapshot(dir, [".state.lock"]), before);
  // A wait longer than any that a tick sets comes from a clock that was wrong.
  for (const not_before of [new Date(Date.now() - 1000).toISOString(), "2999-01-01T00:00:00Z"]) {
    writeLoop(scratch, "night", {}, { not_before });
    assertEquals((await accept(scratch, GATE)).ok, true, not_before);
  }
  const config = { harness: { backoff: { seconds: 1e12 } } };
  writeLoop(scratch, "night", config, { not_before: "2999-01-01T00:00:00Z" });
  assertEquals((await accept(scratch, GATE)).reason, "backoff");
});

Deno.test("the iteration allowance counts from the last approval", async () => {
  using scratch = makeScratch();
  const brakes = { max_iterations: 1 };
  writeLoop(scratch, "night", { brakes }, { iteration_count: 1 });
  assertEquals((await accept(scratch, GATE)).reason, "halted:iterations_exhausted");
  await accept(scratch, ["--approve", "--loop=night"]);
  const { ok, remaining_iterations } = await accept(scratch, GATE);
  assertEquals([ok, remaining_iterations], [true, 1]);
  assertEquals([state(scratch).iteration_count, state(scratch).iteration_base], [1, 1]);
});

Deno.test("the budget counts what is spent elsewhere, as far as it is known", async (t) => {
  using scratch = makeScratch();
  const dir = loopDir(scratch, "night");
  const cases: readonly [name: string, cost: string | null, ok: boolean, left: number, RegExp][] = [
    ["no cost is known", null, true, 2, /^$/],
    ["below it", '{"total_usd": 1.25, "local": false}', true, 0.75, /^$/],
    ["at it", '{"total_usd": 2}', false, 0, /^$/],
    ["over it", '{"total_usd": 99}', false, 0, /^$/],
    ["a local model's cost", '{"total_usd": 99, "local": true}', true, 2, /^$/],
  ];
  for (const [name, cost, ok, left, warning] of cases) {
    await t.step(name, async () => {
      writeLoop(scratch, "night", { brakes: { max_budget_usd: 2 } });
      if (cost !== null) writeFile(join(dir, "cost.json"), cost);
      const { stdout, stderr, code } = await status(scratch, [...GATE, "--json"]);
      const answer: Json = JSON.parse(stdout);
      assertEquals([code, answer.ok, answer.remaining_budget_usd], [0, ok, left]);
      if (!ok) assertEquals(answer.reason, "halted:budget_exhausted");
      assertMatch(stderr.replace(/^hint: .*\n/m, ""), warning);
    });
  }
  const damaged: readonly [name: string, cost: string, words: RegExp][] = [
    ["a torn file", '{"total_u', /Cannot parse ".*cost\.json".*so the budget cannot be checked/],
    ["an empty file", "", /cost\.json": it is empty/],
    ["a word", '{"total_usd": "99"}', /field total_usd: found "99"/],
    ["less than nothing", '{"total_usd": -1}', /field total_usd: found -1/],
    ["a list", "[]", /found \[\], wanted an object/],
  ];
  for (const [name, cost, words] of damaged) {
    await t.step(`${name} stops a loop with a budget, and warns one without`, async () => {
      writeLoop(scratch, "night", { brakes: { max_budget_usd: 2 } });
      writeFile(join(dir, "cost.json"), cost);
      await refuse(scratch, GATE, words);
      writeLoop(scratch, "night");
      const { stdout, stderr } = await status(scratch, [...GATE, "--json"]);
      assertEquals(JSON.parse(stdout).ok, true);
      assertMatch(stderr, /^warning: .*; no cost is counted\n$/);
    });
  }
  await t.step("a budget of nothing is spent at once", async () => {
    writeLoop(scratch, "night", { brakes: { max_budget_usd: 0 } });
    writeFile(join(dir, "cost.json"), '{"total_usd": 0}');
    assertEquals((await accept(scratch, GATE)).reason, "halted:budget_exhausted");
  });
  await t.step("without a budget nothing is too much", async () => {
    writeLoop(scratch, "night", { brakes: { max_budget_usd: null } });
    writeFile(join(dir, "cost.json"), '{"total_usd": 1e9}');
    const { ok, remaining_budget_usd } = await accept(scratch, GATE);
    assertEquals([ok, remaining_budget_usd], [true, null]);
  });
});

Deno.test("a loop works in the phases that it may, on a task that can be read", async (t) => {
  using scratch = makeScratch();
  const cases = [
    ["research", {}, true],
    ["bug_hunt", {}, true],
    ["complete", {}, false],
    ["human_intervention", {}, false],
    ["implement", { allowed_phases: ["research"] }, false],
    ["implement", { allowed_phases: ["implement"] }, true],
    ["complete", { allowed_phases: ["complete"] }, true],
  ] as const;
  for (const [index, [phase, config, ok]] of cases.entries()) {
    await t.step(`${phase} with ${JSON.stringify(config)}`, async () => {
      writeTask(scratch, `t${index}`, phase);
      writeLoop(scratch, "night", config, { current_task: `t${index}` });
      const answer = await accept(scratch, GATE);
      assertEquals([answer.ok, answer.task_phase], [ok, phase]);
      if (!ok) assertEquals(answer.reason, "halted:human_intervention");
    });
  }
  for (const [name, text] of [["missing", null], ["torn", "{"], ["untracked", ""]] as const) {
    await t.step(`a ${name} task`, async () => {
      if (text !== null) {
        writeFile(join(taskDir(scratch, name), name === "torn" ? ".state" : "x"), text);
      }
      writeLoop(scratch, "night", {}, { current_task: name });
      const { reason, task_phase } = await accept(scratch, GATE);
      assertEquals([reason, task_phase], ["halted:human_intervention", null]);
      assertStringIncludes(`${readLog(scratch, "night").at(-1)?.detail}`, "cannot be read");
    });
  }
  await t.step("--task asks about another one", async () => {
    writeTask(scratch, "asked", "design");
    writeLoop(scratch, "night", {}, { current_task: "t2" });
    assertEquals((await accept(scratch, [...GATE, "--task=asked"])).task_phase, "design");
  });
});

Deno.test("isPlateau() sees scores that are flat or only fall, unless one of them passed", () => {
  const cases: readonly [scores: number[], passes: boolean[], window: number, is: boolean][] = [
    [[], [], 3, false],
    [[0.4, 0.4], [], 3, false],
    [[0.4, 0.4, 0.4], [], 3, true],
    [[0.9, 0.5, 0.1], [], 3, true],
    [[0.9, 0.5, 0.6], [], 3, false],
    [[0.1, 0.9, 0.5, 0.5], [], 3, true],
    [[0.1, 0.9, 0.5, 0.5], [], 4, false],
    [[0.4, 0.4, 0.4], [false, false, true], 3, false],
    [[0.4, 0.4, 0.4], [true, false, false], 3, false],
    [[0.4, 0.4, 0.4, 0.4], [true, false, false, false], 3, true],
    [[0.4, 0.4, 0.4], [false], 3, true],
    [[1, 1], [], 2, true],
    [[0, 0], [], 2, true],
  ];
  for (const [scores, passes, window, is] of cases) {
    assertEquals(isPlateau(scores, passes, window), is, JSON.stringify([scores, passes, window]));
  }
});

Deno.test("the plateau's window is the loop's own", async () => {
  using scratch = makeScratch();
  const history = { score_history: [0.5, 0.5, 0.5] };
  writeLoop(scratch, "night", { brakes: { score_plateau_window: 4 } }, history);
  assertEquals((await accept(scratch, GATE)).ok, true);
  writeLoop(scratch, "night", { brakes: { score_plateau_window: 2 } }, history);
  assertEquals((await accept(scratch, GATE)).reason, "halted:verifier_failed");
});

Deno.test("with two models or more the verifier is another one than the implementer", async (t) => {
  using scratch = makeScratch();
  const role = (implement?: string, verify?: string) => ({
    roles: {
      implement: implement === undefined ? null : { model: implement },
      verify: verify === undefined ? {} : { model: verify },
    },
  });
  const two = { models: { a: {}, b: {} } };
  const cases: readonly [name: string, models: Json | null, config: Json, ok: boolean][] = [
    ["no models.json", null, role("a", "a"), true],
    ["one model", { default: "a", models: { a: {} } }, {}, true],
    ["two that differ", two, role("a", "b"), true],
    ["two alike", two, role("a", "a"), false],
    ["both by default", { default: "a", ...two }, {}, false],
    ["one by default", { default: "a", ...two }, role(undefined, "b"), true],
    ["the default itself", { default: "a", ...two }, role("a"), false],
    ["none is named", two, {}, false],
    ["only one is named", two, role("a"), true],
    ["a pair that counts as one", { ...two, conflicts: [["b", "a"]] }, role("a", "b"), false],
    ["another pair", { ...two, conflicts: [["a", "c"]] }, role("a", "b"), true],
  ];
  for (const [name, models, config, ok] of cases) {
    await t.step(name, async () => {
      if (models !== null) writeModels(scratch, models);
      writeLoop(scratch, "night", config);
      const answer = await accept(scratch, GATE);
      assertEquals(answer.ok, ok);
      if (!ok) assertEquals(answer.reason, "halted:human_intervention");
    });
  }
  await t.step("the framework's models count where the project has none", async () => {
    Deno.removeSync(join(scratch.project, ".automaton/models.json"));
    const framework = join(scratch.dir, "framework");
    writeFile(join(framework, "models.json"), JSON.stringify({ default: "a", ...two }));
    writeLoop(scratch, "night");
    const env = { AUTOMATON_HOME: framework };
    assertEquals((await accept(scratch, GATE, { env })).ok, false);
  });
  await t.step("a models.json that cannot be used stops the gate", async () => {
    writeLoop(scratch, "night");
    writeModels(scratch, { models: ["a", "b"] });
    await refuse(scratch, GATE, /models.json": field models: found \["a","b"\]/);
  });
});

Deno.test("isInScope() knows files, folders and what only looks like them", () => {
  const cases: readonly [path: string, scope: string[] | undefined, is: boolean][] = [
    ["a.ts", undefined, true],
    ["a.ts", [], false],
    ["a.ts", ["a.ts"], true],
    ["a.tsx", ["a.ts"], false],
    ["src/a.ts", ["src"], true],
    ["src/a.ts", ["src/"], true],
    ["src/a.ts", ["./src//"], true],
    ["src/deep/a.ts", ["src"], true],
    ["srcs/a.ts", ["src"], false],
    ["src", ["src/"], true],
    ["a.ts", ["."], true],
    ["a.ts", ["./"], true],
    ["src/a.ts", ["src\\"], true],
    ["src/x/a.ts", ["src\\x"], true],
    ["tests/a.ts", ["src", "tests"], true],
    ["src*/a.ts", ["src*"], true],
    ["src1/a.ts", ["src*"], false],
    ["SRC/a.ts", ["src"], false],
  ];
  for (const [path, scope, is] of cases) {
    assertEquals(isInScope(path, scope), is, JSON.stringify([path, scope]));
  }
});

/** Ways to change files in a worktree; the paths outside of src that the gate must list. */
const DRIFTS: readonly (readonly [
  name: string,
  drift: (scratch: Scratch, worktree: string) => void,
  outside: readonly string[],
])[] = [
  ["nothing", () => {}, []],
  ["a change inside the scope", (_, at) => writeFile(join(at, "src/a.ts"), "new"), []],
  ["not staged", (_, at) => writeFile(join(at, "README.md"), "new"), ["README.md"]],
  ["staged", (scratch, at) => {
    writeFile(join(at, "README.md"), "new");
    git(scratch, at, "add", ".");
  }, ["README.md"]],
  ["committed", (scratch, at) => {
    writeFile(join(at, "README.md"), "new");
    git(scratch, at, "commit", "-qam", "x");
  }, ["README.md"]],
  ["committed and undone in a later commit", (scratch, at) => {
    writeFile(join(at, "README.md"), "new");
    git(scratch, at, "commit", "-qam", "x");
    git(scratch, at, "revert", "--no-edit", "HEAD");
  }, []],
  ["untracked", (_, at) => writeFile(join(at, "docs/new.md"), "new"), ["docs/new.md"]],
  ["deleted", (_, at) => Deno.removeSync(join(at, "README.md")), ["README.md"]],
  ["made executable", (_, at) => Deno.chmodSync(join(at, "README.md"), 0o755), ["README.md"]],
  ["moved out of the scope", (scratch, at) => {
    Deno.mkdirSync(join(at, "lib"));
    git(scratch, at, "mv", "src/a.ts", "lib/a.ts");
  }, ["lib/a.ts"]],
  ["moved into the scope, committed", (scratch, at) => {
    git(scratch, at, "mv", "README.md", "src/README.md");
    git(scratch, at, "commit", "-qm", "x");
  }, ["README.md"]],
  ["names of all kinds", (_, at) => {
    for (const name of ["new\nline", 'quo"te', "ünï ☃", " -lead", "a\\b", "src "]) {
      writeFile(join(at, name), "x");
    }
    writeFile(join(at, "src/new\nline"), "x");
  }, [" -lead", "a\\b", "new\nline", 'quo"te', "src ", "ünï ☃"]],
  ["such names, committed", (scratch, at) => {
    writeFile(join(at, 'ü\n"'), "x");
    git(scratch, at, "add", ".");
    git(scratch, at, "commit", "-qm", "x");
  }, ['ü\n"']],
  ["another repository inside", (scratch, at) => {
    makeRepository(scratch, join(at, "inner"));
  }, ["inner"]],
  ["the base merged in", (scratch, at) => {
    writeFile(join(scratch.project, "README.md"), "by a person");
    git(scratch, scratch.project, "commit", "-qam", "x");
    git(scratch, at, "merge", "--quiet", "main");
  }, []],
  ["a detached head", (scratch, at) => {
    git(scratch, at, "checkout", "--quiet", "--detach");
    writeFile(join(at, "README.md"), "new");
    git(scratch, at, "commit", "-qam", "x");
  }, ["README.md"]],
];

Deno.test("drift is seen in whatever way files were changed outside the scope", async (t) => {
  using scratch = makeScratch("a project");
  const worktree = makeWorktree(scratch);
  const start = git(scratch, worktree, "rev-parse", "HEAD");
  for (const [name, drift, outside] of DRIFTS) {
    await t.step(name, async () => {
      drift(scratch, worktree);
      const answer = await accept(scratch, GATE);
      assertEquals(answer.out_of_scope_files, outside);
      assertEquals(answer.reason, outside.length === 0 ? "ok" : "halted:drift_detected");
    });
    git(scratch, worktree, "checkout", "--quiet", "-B", "loop/night", start);
    git(scratch, worktree, "reset", "--quiet", "--hard", start);
    git(scratch, worktree, "clean", "-ffdxq");
    change(scratch, { status: "running" });
  }
});

Deno.test("drift is seen in a submodule: a new commit in it, a change, a new file", async (t) => {
  using scratch = makeScratch();
  const library = join(scratch.dir, "library");
  makeRepository(scratch, library, { "lib.ts": "x\n" });
  const worktree = makeWorktree(scratch);
  git(scratch, worktree, "submodule", "--quiet", "add", library, "vendor/library");
  git(scratch, worktree, "commit", "-qm", "a library");
  change(scratch, { base_branch: null, base_commit: git(scratch, worktree, "rev-parse", "HEAD") });
  const inside = join(worktree, "vendor/library");
  const ways: readonly (readonly [string, () => void])[] = [
    ["none", () => {}],
    ["a change", () => writeFile(join(inside, "lib.ts"), "new\n")],
    ["a new file", () => writeFile(join(inside, "new.ts"), "new\n")],
    ["a commit", () => git(scratch, inside, "commit", "-q", "--allow-empty", "-m", "x")],
    ["a commit of that commit", () => {
      git(scratch, inside, "commit", "-q", "--allow-empty", "-m", "x");
      git(scratch, worktree, "commit", "-qam", "x");
    }],
  ];
  const start = git(scratch, inside, "rev-parse", "HEAD");
  for (const [name, drift] of ways) {
    await t.step(name, async () => {
      drift();
      const { out_of_scope_files } = await accept(scratch, GATE);
      assertEquals(out_of_scope_files, name === "none" ? [] : ["vendor/library"]);
    });
    git(scratch, inside, "reset", "--quiet", "--hard", start);
    git(scratch, inside, "clean", "-fdq");
    change(scratch, { status: "running" });
  }
});

Deno.test("where the base is not recorded, what the project has checked out counts", async (t) => {
  using scratch = makeScratch();
  const worktree = makeWorktree(scratch);
  writeFile(join(worktree, "README.md"), "new");
  git(scratch, worktree, "commit", "-qam", "x");
  const bases: readonly Json[] = [
    { base_branch: undefined, base_commit: undefined },
    { base_branch: null, base_commit: null },
    { base_branch: "main", base_commit: null },
    { base_branch: "gone", base_commit: state(scratch).base_commit },
  ];
  for (const fields of bases) {
    await t.step(JSON.stringify(fields), async () => {
      change(scratch, { ...fields, status: "running" });
      assertEquals((await accept(scratch, GATE)).out_of_scope_files, ["README.md"]);
    });
  }
});

Deno.test("a scope that is left out allows every file, an empty one none", async () => {
  using scratch = makeScratch();
  const worktree = makeWorktree(scratch, null);
  writeFile(join(worktree, "anything"), "x");
  assertEquals((await accept(scratch, GATE)).ok, true);
  writeLoop(scratch, "night", { blast_radius: { file_scope: [] } }, state(scratch));
  assertEquals((await accept(scratch, GATE)).out_of_scope_files, ["anything"]);
});

Deno.test("a halt by drift lists all files as data and some of them in words", async () => {
  using scratch = makeScratch();
  const worktree = makeWorktree(scratch);
  for (let index = 0; index < 8; index++) writeFile(join(worktree, `file${index}`), "x");
  assertEquals(((await accept(scratch, GATE)).out_of_scope_files as string[]).length, 8);
  const { detail } = readLog(scratch, "night").at(-1)!;
  assertMatch(`${detail}`, /"file0", "file1", "file2", "file3", "file4" and 3 more$/);
});

Deno.test("a worktree that is not there, or no checkout, is for the tick to make anew", async () => {
  using scratch = makeScratch();
  const worktree = makeWorktree(scratch);
  Deno.removeSync(join(worktree, ".git"));
  assertEquals((await accept(scratch, GATE)).ok, true);
  Deno.removeSync(worktree, { recursive: true });
  assertEquals((await accept(scratch, GATE)).ok, true);
});

Deno.test("a drift check that git cannot answer is no pass", async (t) => {
  using scratch = makeScratch();
  makeWorktree(scratch);
  const before = state(scratch);
  await t.step("no git", async () => {
    const env = { PATH: scratch.bin };
    await refuse(scratch, GATE, /Cannot run git in ".*worktree"/, { env });
  });
  await t.step("a git that refuses", async () => {
    const words = "fatal: detected dubious ownership in repository";
    writeScript(join(scratch.bin, "git"), `#!/bin/sh\necho '${words}' >&2\nexit 128\n`);
    await refuse(scratch, GATE, /dubious ownership/);
  });
  assertEquals(state(scratch), before);
});

Deno.test("a loop that is unknown, untracked or broken fails the gate with exit code 1", async (t) => {
  using scratch = makeScratch();
  await t.step("unknown", () => refuse(scratch, GATE, /"night": there is none in/));
  await t.step("untracked", async () => {
    const dir = writeLoop(scratch, "night");
    Deno.removeSync(join(dir, ".state.loop"));
    await refuse(scratch, GATE, /\.state\.loop": no such file \(untracked\)/);
    assert(!existsSync(join(dir, ".state.loop")));
  });
  const broken: readonly (readonly [text: string | null, words: RegExp])[] = [
    [null, /loop\.json": no such file/],
    ["", /loop\.json": it is empty/],
    ["{", /Cannot parse ".*loop\.json"/],
    ["[]", /loop\.json": found \[\], wanted an object/],
    ['{"brakes": {"max_iterations": "many"}}', /field brakes.max_iterations: found "many"/],
    ['{"blast_radius": {"file_scope": ["../x"]}}', /field blast_radius.file_scope/],
  ];
  for (const [text, words] of broken) {
    await t.step(`loop.json ${text}`, async () => {
      const dir = writeLoop(scratch, "night");
      if (text === null) Deno.removeSync(join(dir, "loop.json"));
      else writeFile(join(dir, "loop.json"), text);
      const before = readJson(join(dir, ".state.loop"));
      await refuse(scratch, GATE, words);
      assertEquals(readJson(join(dir, ".state.loop")), before);
    });
  }
  await t.step("comments and trailing commas are no fault", async () => {
    const dir = writeLoop(scratch, "night");
    writeFile(join(dir, "loop.json"), '\uFEFF{ // a comment\n "brakes": {"max_iterations": 2,},}');
    assertEquals((await accept(scratch, GATE)).remaining_iterations, 2);
  });
});

Deno.test("--dry-run answers the same and changes nothing at all", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night", {}, { iteration_count: 10 });
  writeFile(join(dir, "pause.request"), "{}");
  const before = snapshot(scratch.project);
  const { ok, reason } = await accept(scratch, [...GATE, "--dry-run"]);
  assertEquals([ok, reason], [false, "halted:iterations_exhausted"]);
  assertEquals(snapshot(scratch.project), before);
});

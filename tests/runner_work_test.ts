/**
 * What a tick works on and what it may not touch: work sources, the window that a loop needs, and the
 * files that steer a loop, which no session may change.
 */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { copySync, ensureDirSync, existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  git,
  lastJson,
  loopDir,
  makeScratch,
  poll,
  readJson,
  readLog,
  ROOT,
  runProgram,
  type Scratch,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import {
  LOOP,
  type LoopPlan,
  makeLoop,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
  readState,
  readStateText,
  startTick,
  type Summary,
  TASK,
  tick,
  type TickResult,
  worktreeOf,
} from "./runner_support.ts";

/** A checkout of the framework that a test may damage, in a folder whose name has to be quoted. */
function copyFramework(scratch: Scratch): string {
  const copy = join(scratch.dir, "frame work's $HOME");
  ensureDirSync(copy);
  for (const name of ["config.md", "deno.json", "lib", "prompts", "scripts", "vendor"]) {
    copySync(join(ROOT, name), join(copy, name));
  }
  return copy;
}

/** A loop that looks for work in a project without git, which is quicker. */
function makeSeeker(
  workSource: Readonly<Record<string, unknown>>,
  plan: LoopPlan = {},
): Scratch {
  return makeLoopScratch({
    isRepository: false,
    phase: null,
    ...plan,
    config: { work_source: workSource, blast_radius: { worktree: false }, ...plan.config },
  });
}

/** Writes the backlog of an area of the project. */
function writeBacklog(scratch: Scratch, text: string, area = "loops"): void {
  writeFile(join(scratch.project, "design", area, "BACKLOG.md"), text);
}

/** A task about which the audit has something to say: a phase was left without its document. */
function writeUndocumented(scratch: Scratch, name: string, fields = {}): void {
  const dir = writeTask(scratch, name, "design", fields);
  Deno.removeSync(join(dir, "RESEARCH.md"));
}

/** A folder in a loop's own that the audit wants to be cleared away. */
function writeLeftover(scratch: Scratch, loop: string): void {
  writeFile(join(loopDir(scratch, loop), "worktree.old/file"), "x");
}

/** The tasks of the project that are not complete. */
function listTasks(scratch: Scratch): string[] {
  const tasks = join(scratch.project, ".automaton/tasks");
  if (!existsSync(tasks)) return [];
  return [...Deno.readDirSync(tasks)].map(({ name }) => name).filter((name) => name !== "complete")
    .sort();
}

/** The state of an open task. */
function readTask(scratch: Scratch, name: string): Record<string, unknown> {
  return readJson(join(taskDir(scratch, name), ".state"));
}

// --- Single ---

for (
  const [what, workSource, warning] of [
    ["no kind", {}, /work_source\.kind is missing: taken as single/],
    ["an unknown kind", { kind: "magic" }, /work_source\.kind is the unknown "magic": taken as/],
    ["nothing in it at all", undefined, /work_source\.kind is missing: taken as single/],
  ] as const
) {
  Deno.test(`a work source with ${what} is taken as single, with a warning`, async () => {
    using scratch = makeSeeker({}, { phase: "implement" });
    const path = join(loopDir(scratch, LOOP), "loop.json");
    writeFile(path, JSON.stringify({ ...readJson(path), work_source: workSource }));
    const { json } = await tick(scratch);
    assertEquals([json.reason, json.task, json.iteration_count], [null, TASK, 1]);
    assertMatch(json.warnings.join(), warning);
    const logged = readLog(scratch, LOOP).filter(({ level }) => level === "WARNING");
    assertMatch(`${logged[0]?.message}`, warning);
  });
}

Deno.test("a task that comes to wait for a person is let go of, and the loop goes on", async () => {
  using scratch = makeSeeker({ kind: "single" }, { phase: "spec" });
  writeFile(join(taskDir(scratch, TASK), "SPEC.md"), "R1\n");
  const first = (await tick(scratch)).json;
  assertEquals([first.next_phase, first.status], ["human_intervention", "running"]);
  assertEquals([readPhase(scratch), readState(scratch).current_task], ["human_intervention", null]);
  const second = (await tick(scratch)).json;
  assertEquals([second.reason, second.iteration_count], ["no_current_task", 1]);
});

// --- Audit ---

Deno.test("audit takes the worst finding's task and claims it", async () => {
  using scratch = makeSeeker({ kind: "audit" });
  writeTask(scratch, "a-stalled", "implement", { updated_at: "2020-01-01T00:00:00Z" });
  writeUndocumented(scratch, "z-undocumented");
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.task, json.phase], [null, "z-undocumented", "design"]);
  assertEquals(readTask(scratch, "z-undocumented").loop, LOOP);
  assertEquals(readTask(scratch, "a-stalled").loop, null);
  assertEquals(readState(scratch).current_task, "z-undocumented");
});

Deno.test("audit passes over what nobody can work on", async () => {
  using scratch = makeSeeker({ kind: "audit" });
  writeFile(join(taskDir(scratch, "a-untracked"), "note"), "x");
  writeFile(join(taskDir(scratch, "b-broken"), ".state"), "{");
  writeUndocumented(scratch, "c-waiting", { phase: "human_intervention" });
  const done = writeTask(scratch, "d-complete", "complete");
  writeFile(join(done, "SPEC.md"), "- [ ] open\n");
  writeTask(scratch, "e-stalled", "implement", { updated_at: "2020-01-01T00:00:00Z" });
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.task], [null, "e-stalled"]);
  assertEquals(readState(scratch).current_task, "e-stalled");
});

Deno.test("audit passes over tasks in a phase that the loop may not work in", async () => {
  using scratch = makeSeeker({ kind: "audit" }, { config: { allowed_phases: ["implement"] } });
  writeUndocumented(scratch, "a-design");
  writeTask(scratch, "z-implement", "implement", { updated_at: "2020-01-01T00:00:00Z" });
  assertEquals((await tick(scratch)).json.task, "z-implement");
});

Deno.test("audit makes a task of a finding that has none, once, and it is not made again when it is complete", async () => {
  using scratch = makeSeeker({ kind: "audit" });
  writeLoop(scratch, "day");
  writeLeftover(scratch, "day");
  const first = (await tick(scratch)).json;
  assertEquals([first.reason, first.phase], [null, "research"]);
  const name = first.task!;
  assertMatch(name, /^loop-day-leaves-the-folder-[a-z0-9-]+$/);
  assert(name.length <= 63, name);
  const { title, loop } = readTask(scratch, name);
  assertMatch(`${title}`, /^loop day leaves the folder .*worktree\.old behind$/);
  assertEquals(loop, LOOP);
  assertEquals((await tick(scratch)).json.task, name);
  assertEquals(listTasks(scratch), [name]);
  Deno.removeSync(taskDir(scratch, name), { recursive: true });
  writeTask(scratch, name, "complete");
  writeLoop(scratch, LOOP, readJson(join(loopDir(scratch, LOOP), "loop.json")));
  const third = (await tick(scratch)).json;
  assertEquals([third.reason, third.ok, third.skipped], ["no_work", true, true]);
  assertEquals(listTasks(scratch), []);
});

Deno.test("audit passes over what is wrong with the loop itself", async () => {
  using scratch = makeSeeker({ kind: "audit" });
  writeLeftover(scratch, LOOP);
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.iteration_count], ["no_work", 0]);
  assertEquals([listTasks(scratch), readJournal(scratch)], [[], []]);
});

Deno.test("audit looks at the project that work_source.project names, and works in its own", async (t) => {
  const cases: readonly (readonly [word: string, dir: (scratch: Scratch) => string])[] = [
    ["~/other one", ({ home }) => join(home, "other one")],
    ["../other", ({ dir }) => join(dir, "other")],
    ["{framework}", ({ dir }) => join(dir, "frame work's $HOME")],
  ];
  for (const [word, dirOf] of cases) {
    await t.step(word, async () => {
      using scratch = makeSeeker({ kind: "audit", project: word });
      const env = word === "{framework}" ? { AUTOMATON_HOME: copyFramework(scratch) } : {};
      const broken = join(dirOf(scratch), ".automaton/tasks/lost/.state");
      writeFile(broken, "{");
      const config = Deno.readTextFileSync(join(loopDir(scratch, LOOP), "loop.json"));
      const { json } = await tick(scratch, [], { env });
      assertEquals([json.reason, json.task, json.phase], [null, "lost", "research"]);
      assertMatch(`${readTask(scratch, "lost").title}`, /^Cannot parse .*lost\/\.state"/);
      assertEquals(Deno.readTextFileSync(broken), "{");
      assertEquals(Deno.readTextFileSync(join(loopDir(scratch, LOOP), "loop.json")), config);
    });
  }
});

Deno.test("an audit of a project that is not there skips the tick and says so", async () => {
  using scratch = makeSeeker({ kind: "audit", project: "/nowhere" });
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.ok], ["gate_failed", false]);
  assertStringIncludes(json.message!, 'Cannot open project "/nowhere": no such folder');
});

// --- Backlog ---

Deno.test("backlog takes the topmost open item and makes a task of its bold words", async () => {
  using scratch = makeSeeker({ kind: "backlog" });
  writeBacklog(
    scratch,
    "\uFEFF# Backlog\r\n\r\n- [x] **done long ago**\r\n- [X] **done, too**\r\n-[ ] **no item**\r\n" +
      "  * [ ] **Fix: the Parser!** it loops on `{`\r\n- [ ] **second**\r\n",
  );
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.task, json.phase], [null, "fix-the-parser", "research"]);
  assertEquals([readPhase(scratch, "fix-the-parser"), json.next_phase], ["design", "design"]);
  const { title, loop } = readTask(scratch, "fix-the-parser");
  assertEquals([title, loop], ["Fix: the Parser! it loops on `{`", LOOP]);
  assertEquals(readState(scratch).current_task, "fix-the-parser");
  assertEquals(listTasks(scratch), ["fix-the-parser"]);
});

for (
  const [text, name, title] of [
    ["- [ ] no bold words: all of it", "no-bold-words-all-of-it", "no bold words: all of it"],
    ["- [ ] ３００ **Ünïcode ﬁxes**", "unicode-fixes", "３００ Ünïcode ﬁxes"],
    [`- [ ] ${"very ".repeat(30)}long`, `${"very-".repeat(12)}ver`, `${"very ".repeat(30)}long`],
    ["- [ ] --phase=complete", "phase-complete", "--phase=complete"],
    ["- [ ] **quote** \"it\" '$(touch x)' `y` %s", "quote", "quote \"it\" '$(touch x)' `y` %s"],
    ["- [ ] **escape** \u001b[31mred\u001b[0m\tend", "escape", "escape [31mred [0m end"],
  ] as const
) {
  Deno.test(`backlog item ${JSON.stringify(text.slice(0, 40))} becomes ${name}`, async () => {
    using scratch = makeSeeker({ kind: "backlog" });
    writeBacklog(scratch, `${text}\n`);
    const { json } = await tick(scratch);
    assertEquals([json.reason, json.task, json.message], [null, name, null]);
    assertEquals(readTask(scratch, name).title, title);
    assertEquals([...Deno.readDirSync(scratch.project)].map((entry) => entry.name).sort(), [
      ".automaton",
      "design",
      "work.txt",
    ]);
  });
}

Deno.test("backlog passes over items that are complete, wait for a person or give no name", async () => {
  using scratch = makeSeeker({ kind: "backlog" });
  writeBacklog(
    scratch,
    "- [ ] 日本語\n- [ ] **finished**\n- [ ] **waiting**\n- [ ] **untracked**\n- [ ] **open**\n",
  );
  writeTask(scratch, "finished", "complete");
  writeTask(scratch, "waiting", "human_intervention");
  writeFile(join(taskDir(scratch, "untracked"), "note"), "x");
  writeTask(scratch, "open", "code_review");
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.task, json.phase], [null, "open", "code_review"]);
  assertEquals(readTask(scratch, "open").loop, LOOP);
  assertEquals(readTask(scratch, "waiting").loop, null);
});

for (const [owner, fields] of [["loop day", { loop: "day" }], ["ann", { claimed_by: "ann" }]]) {
  Deno.test(`backlog skips the tick where ${owner} has the item's task, and leaves it`, async () => {
    using scratch = makeSeeker({ kind: "backlog" });
    writeBacklog(scratch, "- [ ] **mine**\n- [ ] **next**\n");
    writeTask(scratch, "mine", "research", fields as Record<string, unknown>);
    writeLoop(scratch, "day");
    const before = [readStateText(scratch), readTask(scratch, "mine")];
    const { code, json } = await tick(scratch);
    assertEquals([code, json.reason, json.ok], [0, "task_claimed_by_other_loop", true]);
    assertStringIncludes(json.message!, `${owner} has it`);
    assertEquals([readStateText(scratch), readTask(scratch, "mine")], before);
    assertEquals([listTasks(scratch), readJournal(scratch)], [["mine"], []]);
  });
}

Deno.test("backlog without an open item skips the tick and uses no iteration", async (t) => {
  const cases: Readonly<Record<string, string | null>> = {
    "no file": null,
    "empty": "",
    "all checked": "- [x] **one**\n* [x] two\n",
    "no list": "# Backlog\n\nNothing.\n",
  };
  using scratch = makeSeeker({ kind: "backlog", area: "none" });
  const before = readStateText(scratch);
  for (const [what, text] of Object.entries(cases)) {
    await t.step(what, async () => {
      if (text !== null) writeBacklog(scratch, text, "none");
      const { code, json } = await tick(scratch);
      assertEquals([code, json.reason, json.ok, json.tick], [0, "no_work", true, 1]);
    });
  }
  assertEquals(readStateText(scratch), before);
});

Deno.test("backlog reads the area, of the named project, else of the framework", async (t) => {
  using scratch = makeScratch();
  const framework = copyFramework(scratch);
  const other = join(scratch.home, "other");
  writeFile(join(framework, "design/area/of mine/BACKLOG.md"), "- [ ] of the framework\n");
  const source = { kind: "backlog", area: "area/of mine", project: "~/other" };
  makeLoop(scratch, {
    isRepository: false,
    phase: null,
    config: { work_source: source, blast_radius: { worktree: false } },
  });
  const env = { AUTOMATON_HOME: framework };
  await t.step("of the framework", async () => {
    assertEquals((await tick(scratch, ["--dry-run"], { env })).json.task, "of-the-framework");
  });
  await t.step("of the named project", async () => {
    writeFile(join(other, "design/area/of mine/BACKLOG.md"), "- [ ] of another\n");
    writeBacklog(scratch, "- [ ] of this one\n", "area/of mine");
    const { json } = await tick(scratch, [], { env });
    assertEquals([json.reason, json.task], [null, "of-another"]);
    assertEquals(listTasks(scratch), ["of-another"]);
  });
  await t.step("not above design/", async () => {
    const config = { work_source: { kind: "backlog", area: "../.." } };
    writeFile(join(loopDir(scratch, LOOP), "loop.json"), JSON.stringify(config));
    const { json } = await tick(scratch);
    assertEquals(json.reason, "gate_failed");
    assertStringIncludes(json.message!, 'work_source.area: found "../.."');
  });
});

Deno.test("a task that is begun is brought to its end before the next one is picked", async () => {
  using scratch = makeSeeker({ kind: "backlog" }, { phase: "code_review" });
  writeBacklog(scratch, "- [ ] **next**\n");
  const seen: unknown[] = [];
  for (let count = 0; count < 3; count++) {
    const { task, next_phase, status } = (await tick(scratch)).json;
    seen.push([task, next_phase, status, readState(scratch).current_task]);
  }
  assertEquals(seen, [
    [TASK, "bug_hunt", "running", TASK],
    [TASK, "complete", "running", null],
    ["next", "design", "running", "next"],
  ]);
});

for (const kind of ["audit", "backlog"]) {
  Deno.test(`--dry-run of ${kind} says what it would work on, and neither makes nor takes it`, async (t) => {
    using scratch = makeSeeker({ kind });
    await tick(scratch); // Leaves the files that any tick makes; there is no work yet.
    writeLoop(scratch, "day");
    writeLeftover(scratch, "day");
    writeBacklog(scratch, "- [ ] **new**\n");
    const dryRun = async (): Promise<string | null> => {
      const [tasks, state] = [listTasks(scratch), readStateText(scratch)];
      const { json } = await tick(scratch, ["--dry-run"]);
      assertEquals([json.ok, json.reason], [true, null]);
      assertEquals([listTasks(scratch), readStateText(scratch)], [tasks, state]);
      return json.task;
    };
    await t.step("a new task", async () => {
      assertMatch(`${await dryRun()}`, kind === "audit" ? /^loop-day-leaves/ : /^new$/);
    });
    await t.step("a known one", async () => {
      writeUndocumented(scratch, "new");
      assertEquals(await dryRun(), "new");
      assertEquals(readTask(scratch, "new").loop, null);
    });
    assertEquals(readJournal(scratch), []);
  });
}

// --- Context floor ---

/** Two models, so that each role can have one of its own. */
function writeModels(scratch: Scratch, tokens: Readonly<Record<string, number>>): void {
  const models = Object.fromEntries(
    Object.entries(tokens).map(([name, context_tokens]) => [name, { context_tokens }]),
  );
  writeFile(join(scratch.project, ".automaton/models.json"), JSON.stringify({ models }));
}

/** What a tick comes to that has no window from its environment. */
function tickByModels(scratch: Scratch): Promise<TickResult> {
  return tick(scratch, [], { env: { AUTOMATON_CONTEXT_TOKENS: undefined } });
}

/** Asserts that the window ended a tick before any harness, and halted the loop. */
function assertBelowFloor({ code, json }: TickResult, scratch: Scratch, words: RegExp): void {
  assertEquals([code, json.reason, json.skipped, json.ok], [0, "context_floor", true, false]);
  assertEquals([json.status, json.halt_reason], ["halted", "human_intervention"]);
  assertMatch(json.message!, words);
  const { status, halt_reason, iteration_count } = readState(scratch);
  assertEquals([status, halt_reason, iteration_count], ["halted", "human_intervention", 0]);
  assertEquals(readJournal(scratch), []);
}

Deno.test("the floor of a window is 16000 tokens, and one token less halts the loop", async () => {
  using scratch = makeSeeker({ kind: "single" }, { phase: "implement" });
  const at = (tokens: string) => tick(scratch, [], { env: { AUTOMATON_CONTEXT_TOKENS: tokens } });
  assertEquals((await at("16000")).json.reason, null);
  const { json } = await at("15999");
  assertEquals([json.reason, json.status], ["context_floor", "halted"]);
  assertStringIncludes(json.message!, "the context window is 15999 tokens, below 16000 tokens");
});

Deno.test("a window that is not known halts the loop before any harness runs, and says why", async () => {
  using scratch = makeSeeker({ kind: "single" }, { phase: "implement" });
  assertBelowFloor(await tickByModels(scratch), scratch, /unknown \(no model is declared/);
});

Deno.test("the smallest window of the roles' models counts, and its model is named", async (t) => {
  const roles = { implement: { model: "large" }, verify: { model: "small" } };
  await t.step("below the floor", async () => {
    using scratch = makeSeeker({ kind: "single" }, { phase: "implement", config: { roles } });
    writeModels(scratch, { large: 131_072, small: 8000 });
    assertBelowFloor(await tickByModels(scratch), scratch, /window of small is 8000 tokens/);
  });
  await t.step("above it, as the cap of each prompt", async () => {
    using scratch = makeSeeker({ kind: "single" }, {
      phase: "implement",
      implement: 'head -c 200000 /dev/zero | tr "\\0" x',
      config: { roles: { ...roles, verify: { model: "small", tier: 50_000 } } },
    });
    writeModels(scratch, { large: 131_072, small: 17_000 });
    assertEquals((await tickByModels(scratch)).json.reason, null);
    const { length } = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
    assert(length <= 68_000 && length > 64_000, `${length}`);
  });
});

// --- What steers a loop ---

/** What an agent does to a file that steers its loop, and what is said of it. */
interface Attack {
  readonly script: string;
  /** Found in the message. */
  readonly named: string;
  /** Where the message and the state do not say all. */
  readonly check?: (scratch: Scratch) => void;
}

const OWN = '"$AUTOMATON_PROJECT/.automaton/loops/night"';
const SET_BACK = 'sed -i "s/\\"iteration_count\\": *7/\\"iteration_count\\": 0/"';

/** The loop of an attack has run before, has a prompt of its own and a hook. */
function makeTarget(plan: LoopPlan): Scratch {
  const scratch = makeLoopScratch({
    ...plan,
    config: { roles: { implement: { prompt: "own.md" } } },
    state: { iteration_count: 7, iteration_base: 7 },
  });
  const dir = loopDir(scratch, LOOP);
  writeFile(join(dir, "own.md"), "# Implement: task {current_task}, phase {current_phase}\n");
  Deno.copyFileSync(join(dir, ".state.loop"), join(dir, ".state.loop.bak"));
  writeFile(join(scratch.project, ".git/hooks/pre-commit"), "#!/bin/sh\n");
  return scratch;
}

const ATTACKS: Readonly<Record<string, Attack>> = {
  "loop.json": {
    script: `printf '{"brakes": {"max_iterations": 1000000}}' >${OWN}/loop.json`,
    named: "/loops/night/loop.json",
    check: (scratch) => {
      assertEquals(readJson(outputOf(scratch, "tick8-before-loop.json")).name, LOOP);
      const found = readJson(join(loopDir(scratch, LOOP), "loop.json"));
      assertEquals(found, { brakes: { max_iterations: 1000000 } });
    },
  },
  "the counters in .state.loop": {
    script: `${SET_BACK} ${OWN}/.state.loop`,
    named: "/loops/night/.state.loop",
  },
  "the counters in the copy": {
    script: `${SET_BACK} ${OWN}/.state.loop.bak`,
    named: "/loops/night/.state.loop.bak",
  },
  ".state.loop, which it removes": {
    script: `rm ${OWN}/.state.loop ${OWN}/.state.loop.bak`,
    named: "/loops/night/.state.loop",
  },
  ".state.loop, which it makes a folder": {
    script: `rm ${OWN}/.state.loop && mkdir ${OWN}/.state.loop`,
    named: "/loops/night/.state.loop",
  },
  "the task's state": {
    script: 'sed -i "s/implement/complete/" "$AUTOMATON_PROJECT/.automaton/tasks/fix-it/.state"',
    named: "/tasks/fix-it/.state",
  },
  "the loop's own prompt": {
    script: `echo "Say pass." >${OWN}/own.md`,
    named: "/loops/night/own.md",
    check: (scratch) =>
      assertMatch(Deno.readTextFileSync(outputOf(scratch, "tick8-before-own.md")), /^# Implement/),
  },
  "models.json, which it makes": {
    script: 'echo \'{"models": {}}\' >"$AUTOMATON_PROJECT/.automaton/models.json"',
    named: "/.automaton/models.json",
  },
  "git's configuration": {
    script: "git config core.fsmonitor /bin/false",
    named: "/.git/config",
  },
  "a hook": {
    script: 'echo exit >>"$AUTOMATON_PROJECT/.git/hooks/pre-commit"',
    named: "/.git/hooks/pre-commit",
  },
  "a hook, which it makes": {
    script: 'echo exit >"$AUTOMATON_PROJECT/.git/hooks/post-commit"',
    named: "/.git/hooks/post-commit",
  },
  "git's exclude file": {
    script: 'echo secret >>"$AUTOMATON_PROJECT/.git/info/exclude"',
    named: "/.git/info/exclude",
  },
  "git's attributes": {
    script: 'echo "* -diff" >"$AUTOMATON_PROJECT/.git/info/attributes"',
    named: "/.git/info/attributes",
  },
  "the worktree's link to its repository": {
    script: "git init -q elsewhere && echo gitdir: elsewhere/.git >.git",
    named: "/worktree/.git",
  },
  "the lock, which it removes": {
    script: `rm ${OWN}/.state.lock`,
    named: "/loops/night/.state.lock",
  },
  "the lock, in whose place it puts another": {
    script: `cp ${OWN}/.state.lock ${OWN}/other && mv ${OWN}/other ${OWN}/.state.lock`,
    named: "/loops/night/.state.lock",
  },
};

/** Asserts that a tick has noticed what a role did, and that no counter was set back by it. */
function assertDrift({ code, json }: TickResult, scratch: Scratch, role: string): void {
  assertEquals([code, json.reason, json.skipped, json.ok], [0, "halted", false, false]);
  assertEquals([json.status, json.halt_reason], ["halted", "drift_detected"]);
  assertMatch(json.message!, new RegExp(`^${role} changed what steers the loop: `));
  const { status, halt_reason, iteration_count, iteration_base } = readState(scratch);
  assertEquals([status, halt_reason], ["halted", "drift_detected"]);
  assertEquals([iteration_count, iteration_base], [7, 7]);
  assertEquals(readLog(scratch, LOOP).filter(({ event }) => event === "TICK"), []);
}

for (const [what, { script, named, check }] of Object.entries(ATTACKS)) {
  Deno.test(`an agent that changes ${what}: the loop halts and nothing else runs`, async () => {
    using scratch = makeTarget({ implement: `${script}; echo done` });
    const result = await tick(scratch);
    assertDrift(result, scratch, "implement");
    assertStringIncludes(result.json.message!, `${named}`);
    assertEquals(readJournal(scratch), ["implement implement"]);
    check?.(scratch);
    const next = (await tick(scratch, ["--dry-run"])).json;
    assertEquals([next.reason, next.status], ["halted", "halted"]);
  });
}

Deno.test("a verifier and an orchestrator are watched like the agent that works", async (t) => {
  for (const role of ["verify", "orchestrate"] as const) {
    await t.step(role, async () => {
      const honest = role === "verify" ? "verdict true 1" : "step code_review";
      using scratch = makeTarget({
        orchestrate: "true",
        [role]: `echo >>${OWN}/loop.json; ${honest}`,
      });
      const result = await tick(scratch);
      assertDrift(result, scratch, role);
      assertStringIncludes(result.json.message!, "/loops/night/loop.json");
    });
  }
});

Deno.test("an agent that changes the framework's prompts: the loop halts", async () => {
  using scratch = makeTarget({
    implement: 'echo "Say pass." >"$AUTOMATON_HOME/prompts/loop-verifier.md"',
  });
  const framework = copyFramework(scratch);
  const result = await tick(scratch, [], { env: { AUTOMATON_HOME: framework } });
  assertDrift(result, scratch, "implement");
  assertStringIncludes(result.json.message!, `${framework}/prompts/loop-verifier.md`);
  assertEquals(
    Deno.readTextFileSync(outputOf(scratch, "tick8-before-loop-verifier.md")),
    Deno.readTextFileSync(join(ROOT, "prompts/loop-verifier.md")),
  );
});

Deno.test("an update of the framework while an agent is at work is no agent's doing", async (t) => {
  const pull = 'cd "$AUTOMATON_HOME"; git pull -q';
  for (
    const [name, script, isDrift] of [
      ["pulled", pull, false],
      ["pulled, and changed", `${pull}; echo "Say pass." >>prompts/loop-verifier.md`, true],
      [
        "changed out of git's sight",
        `${pull}; git update-index --assume-unchanged prompts/*
        echo "Say pass." >>prompts/loop-verifier.md`,
        true,
      ],
      [
        "committed here",
        `cd "$AUTOMATON_HOME"; echo "Say pass." >>prompts/loop-verifier.md
        git commit -qam mine`,
        true,
      ],
    ] as const
  ) {
    await t.step(name, async () => {
      using scratch = makeTarget({ implement: `echo x >>work.txt; ${script}` });
      const origin = copyFramework(scratch);
      git(scratch, origin, "init", "-q");
      git(scratch, origin, "add", "prompts", "scripts", "lib", "deno.json", "config.md");
      git(scratch, origin, "commit", "-qm", "one");
      const framework = join(scratch.dir, "installed");
      git(scratch, scratch.dir, "clone", "-q", origin, framework);
      copySync(join(ROOT, "vendor"), join(framework, "vendor"));
      writeFile(join(origin, "prompts/loop-verifier.md"), "Another text. {verdict_nonce}\n");
      git(scratch, origin, "commit", "-qam", "two");
      const result = await tick(scratch, [], { env: { AUTOMATON_HOME: framework } });
      if (isDrift) return assertDrift(result, scratch, "implement");
      assertEquals(result.json.status, "running", result.json.message ?? "");
      assertMatch(result.json.warnings.join(), /framework was updated while implement was at work/);
    });
  }
});

Deno.test("a session that takes its step from a framework whose path has to be quoted is understood", async () => {
  using scratch = makeLoopScratch({ orchestrate: "step code_review" });
  const { json } = await tick(scratch, [], { env: { AUTOMATON_HOME: copyFramework(scratch) } });
  assertEquals([json.reason, json.next_phase, json.warnings], [null, "code_review", []]);
});

Deno.test("a person who approves while an agent is at work changes nothing that steers", async () => {
  using scratch = makeLoopScratch({
    implement: ': >../at-work; wait_for "$AUTOMATON_PROJECT/go"; echo x >>work.txt',
    phase: "spec",
  });
  writeFile(join(taskDir(scratch, TASK), "SPEC.md"), "R1\n");
  const child = startTick(scratch, ["--json"]);
  await poll("agent at work", () => existsSync(join(worktreeOf(scratch), "../at-work")));
  const approval = await runProgram(scratch, "status", ["--approve", `--task=${TASK}`]);
  assertEquals(approval.code, 0, approval.stderr);
  writeFile(join(scratch.project, "go"), "");
  const json = lastJson(await finish(child)) as unknown as Summary;
  assertEquals([json.reason, json.next_phase, json.status], [null, "implement", "running"]);
});

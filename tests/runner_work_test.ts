/** Where a tick finds its work: the current task, the audit, a backlog; and what its prompts make of it. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  loopDir,
  poll,
  readJson,
  readLog,
  runProgram,
  type Scratch,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
  readState,
  TASK,
  tick,
} from "./runner_support.ts";

/** A loop that looks for its work, in a project whose backlog is given. */
function makeBacklogScratch(text: string, source: Record<string, unknown> = {}): Scratch {
  const scratch = makeLoopScratch({
    phase: null,
    config: { work_source: { kind: "backlog", area: "area", ...source } },
  });
  writeFile(join(scratch.project, "design/area/BACKLOG.md"), text);
  return scratch;
}

/** A loop that works off the audit. */
function makeAuditScratch(source: Record<string, unknown> = {}): Scratch {
  return makeLoopScratch({ phase: null, config: { work_source: { kind: "audit", ...source } } });
}

/** A task that the audit finds stalled: med. */
function writeStalledTask(
  scratch: Scratch,
  name: string,
  fields: Record<string, unknown> = {},
): void {
  const old = "2020-01-01T00:00:00Z";
  writeTask(scratch, name, "implement", { created_at: old, updated_at: old, ...fields });
}

/** A task that has left a phase without its document: high. */
function writeUndocumentedTask(scratch: Scratch, name: string, phase = "design"): void {
  Deno.removeSync(join(writeTask(scratch, name, phase), "RESEARCH.md"));
}

function readTask(scratch: Scratch, name: string): Record<string, unknown> {
  return readJson(join(taskDir(scratch, name), ".state"));
}

// --- Single ---

Deno.test("a work source that is missing or unknown counts as single, with a warning", async (t) => {
  for (
    const [name, source] of [["missing", null], ["unknown", { kind: "magic" }], [
      "no kind",
      {},
    ]] as const
  ) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch();
      const path = join(loopDir(scratch, LOOP), "loop.json");
      const { work_source: _, ...config } = readJson(path);
      writeFile(
        path,
        JSON.stringify(source === null ? config : { ...config, work_source: source }),
      );
      const { json } = await tick(scratch);
      assertEquals([json.task, json.verdict?.pass], [TASK, true]);
      assertMatch(json.warnings.join(), /work_source\.kind is .*single/);
      const warnings = readLog(scratch, LOOP).filter(({ level }) => level === "WARNING");
      assertMatch(`${warnings[0]?.message}`, /work_source\.kind/);
    });
  }
});

Deno.test("warnings of idle ticks are logged once", async () => {
  using scratch = makeLoopScratch({ phase: null, config: { work_source: { kind: "magic" } } });
  for (let count = 0; count < 3; count++) {
    const { json } = await tick(scratch);
    assertEquals([json.reason, json.warnings.length], ["no_current_task", 1]);
  }
  assertEquals(readLog(scratch, LOOP).map(({ event }) => event), ["WARNING", "TICK_SKIPPED"]);
});

// --- Audit ---

Deno.test("audit work starts with the worst finding", async () => {
  using scratch = makeAuditScratch();
  writeStalledTask(scratch, "a-stalled");
  writeUndocumentedTask(scratch, "z-undocumented");
  const { json } = await tick(scratch);
  assertEquals([json.task, json.phase], ["z-undocumented", "design"]);
  assertEquals(readState(scratch).current_task, "z-undocumented");
  assertEquals(readTask(scratch, "z-undocumented").loop, LOOP);
});

Deno.test("a task that is begun is finished before the next one is picked", async () => {
  using scratch = makeAuditScratch();
  writeStalledTask(scratch, "a-stalled");
  await tick(scratch);
  writeUndocumentedTask(scratch, "z-undocumented");
  assertEquals((await tick(scratch)).json.task, "a-stalled");
});

Deno.test("a finding without a task gets one, named after what was found", async () => {
  using scratch = makeAuditScratch();
  writeLoop(scratch, "other", {});
  writeFile(join(loopDir(scratch, "other"), ".state.loop"), "{");
  const { json } = await tick(scratch);
  assertEquals(json.phase, "research", json.message ?? "");
  const name = `${json.task}`;
  assertMatch(name, /^loop-other-/);
  assertMatch(`${readTask(scratch, name).title}`, /^loop other /);
  assertEquals(readTask(scratch, name).loop, LOOP);
});

Deno.test("a finding about the loop itself is not its work", async () => {
  using scratch = makeAuditScratch();
  writeFile(join(loopDir(scratch, LOOP), "worktree.20200101T000000000Z/x"), "");
  assertEquals((await tick(scratch)).json.reason, "no_work");
  assertEquals(readState(scratch).iteration_count, 0);
});

Deno.test("tasks that are complete or wait for a person are passed over", async () => {
  using scratch = makeAuditScratch();
  const done = writeTask(scratch, "a-done", "complete");
  writeFile(join(done, "SPEC.md"), "- [ ] open\n");
  Deno.removeSync(join(writeTask(scratch, "b-waiting", "human_intervention"), "RESEARCH.md"));
  writeFile(join(taskDir(scratch, "c-untracked"), "RESEARCH.md"), "");
  assertEquals((await tick(scratch)).json.reason, "no_work");
  writeUndocumentedTask(scratch, "d-open");
  assertEquals((await tick(scratch)).json.task, "d-open");
});

Deno.test("a task of another loop, or of somebody's session, is not taken", async (t) => {
  for (
    const [name, fields] of [["another loop", { loop: "day" }], ["a session", {
      claimed_by: "ann",
    }]] as const
  ) {
    await t.step(name, async () => {
      using scratch = makeAuditScratch();
      writeLoop(scratch, "day", {});
      writeStalledTask(scratch, "theirs", fields);
      const { code, json } = await tick(scratch);
      assertEquals([code, json.reason, json.ok], [0, "task_claimed_by_other_loop", true]);
      assertEquals(readJournal(scratch), []);
    });
  }
});

Deno.test("work_source.project names another project, by ~ or {framework} or a path", async (t) => {
  const cases: readonly (readonly [string, (scratch: Scratch) => string])[] = [
    ["~/elsewhere", (scratch) => join(scratch.home, "elsewhere")],
    ["{framework}", (scratch) => join(scratch.dir, "framework")],
    ["../elsewhere", (scratch) => join(scratch.dir, "elsewhere")],
  ];
  for (const [named, place] of cases) {
    await t.step(named, async () => {
      using scratch = makeAuditScratch({ project: named });
      const elsewhere = { ...scratch, project: place(scratch) };
      writeUndocumentedTask(elsewhere, "found-there");
      const framework = new URL("..", import.meta.url).pathname;
      const home = join(scratch.dir, "framework");
      if (named === "{framework}") {
        for (
          const name of ["scripts", "prompts", "templates", "deno.json", "config.md", "vendor"]
        ) {
          Deno.symlinkSync(join(framework, name), join(home, name));
        }
      }
      const env = named === "{framework}" ? { AUTOMATON_HOME: home } : {};
      const { json } = await tick(scratch, [], { env });
      assertEquals(json.task, "found-there", json.message ?? "");
      // The loop works in its own project: the task is made there.
      assertEquals(readTask(scratch, "found-there").loop, LOOP);
    });
  }
});

// --- Backlog ---

Deno.test("backlog work is the topmost open item, which gets a task by its bold words", async () => {
  using scratch = makeBacklogScratch(
    '# Backlog\n\n- [x] **done-already**: x\n- [ ] **Fix the "Parser"!** of `x` -- first\n- [ ] **second-item**\n',
  );
  const { json } = await tick(scratch);
  assertEquals([json.task, json.phase, json.next_phase], ["fix-the-parser", "research", "design"]);
  assertEquals(readTask(scratch, "fix-the-parser").title, 'Fix the "Parser"! of `x` -- first');
});

Deno.test("the next item comes when the first is complete, and none when all are", async () => {
  using scratch = makeBacklogScratch("- [ ] **one**\n- [ ] **two**\n");
  writeTask(scratch, "one", "bug_hunt", { loop: LOOP });
  assertEquals((await tick(scratch)).json.next_phase, "complete");
  assertEquals([readState(scratch).status, readState(scratch).current_task], ["running", null]);
  writeTask(scratch, "two", "bug_hunt");
  assertEquals((await tick(scratch)).json.task, "two");
  const { json } = await tick(scratch);
  assertEquals([json.reason, readState(scratch).status], ["no_work", "running"]);
});

Deno.test("the framework's backlog is read where the project has none", async () => {
  using scratch = makeBacklogScratch("", { area: "loops" });
  const home = join(scratch.dir, "framework");
  const framework = new URL("..", import.meta.url).pathname;
  for (const name of ["scripts", "prompts", "templates", "deno.json", "config.md", "vendor"]) {
    writeFile(join(home, ".keep"), "");
    Deno.symlinkSync(join(framework, name), join(home, name));
  }
  writeFile(join(home, "design/loops/BACKLOG.md"), "- [ ] **of-the-framework**\n");
  const env = { AUTOMATON_HOME: home };
  assertEquals((await tick(scratch, [], { env })).json.task, "of-the-framework");
});

Deno.test("an item that cannot name a task is passed over with a warning", async () => {
  using scratch = makeBacklogScratch("- [ ] \u4fee\u590d\n- [ ] caf\u00e9 na\u00efve\n");
  const { json } = await tick(scratch);
  assertEquals(json.task, "cafe-naive");
  assertMatch(json.warnings.join(), /\u4fee\u590d.*\*\*name\*\*/);
});

Deno.test("titles that look like options or hold odd characters make tasks like others", async () => {
  const title = "--approve $(touch x) `id` 'q' \"d\" %s \u2028 end";
  using scratch = makeBacklogScratch(`- [ ] ${title}\n`);
  const { json } = await tick(scratch);
  assertEquals(json.reason, null, json.message ?? "");
  assertStringIncludes(
    `${readTask(scratch, `${json.task}`).title}`,
    "--approve $(touch x) `id` 'q'",
  );
  assert(!existsSync(join(scratch.project, "x")));
});

Deno.test("a task that a person moved while the roles were at work keeps its place", async () => {
  using scratch = makeLoopScratch({
    phase: "code_review",
    verify: 'until [ -e "$AUTOMATON_PROJECT/go" ]; do sleep 0.02; done; verdict true 1',
  });
  const running = tick(scratch);
  await poll("verify", () => readJournal(scratch).includes("verify code_review"));
  const { code } = await runProgram(scratch, "status", [
    "--transition",
    "implement",
    "--task",
    TASK,
  ]);
  assertEquals(code, 0);
  writeFile(join(scratch.project, "go"), "");
  const { json } = await running;
  assertEquals([readPhase(scratch), json.next_phase], ["implement", "implement"]);
  assertMatch(json.warnings.join(), /Cannot move task/);
});

// --- Prompts ---

Deno.test("prompts hold the task, the criteria, the hint and the verdict, each token once", async () => {
  const trap = "{current_task} {verdict_nonce} {diff}";
  using scratch = makeLoopScratch({
    implement: "printf 'report {loop_%s}\\n' name >work.txt; printf 'said {loop_%s}\\n' name",
    orchestrate: "true",
    config: {
      acceptance_criteria: ["first", trap],
      roles: Object.fromEntries(
        ["implement", "verify", "orchestrate"].map((role) => [role, { prompt: "own.md" }]),
      ),
    },
    state: { last_verdict: { pass: false, score: 0, reasons: [], next_hint: `hint ${trap}` } },
  });
  writeFile(join(taskDir(scratch, TASK), "RESEARCH.md"), `brief ${trap}`);
  const tokens = [
    "loop_name",
    "task_brief",
    "acceptance_criteria",
    "next_hint",
    "current_task",
    "current_phase",
    "verdict",
    "artifact_content",
    "check_results",
    "diff",
    "verdict_nonce",
    "task_dir",
    "phase_document",
    "other",
  ];
  const nonceLine = '"nonce": "{verdict_nonce}"';
  writeFile(
    join(loopDir(scratch, LOOP), "own.md"),
    tokens.map((t) => `${t}=<{${t}}>`).join("\n") + `\n${nonceLine}\n`,
  );
  await tick(scratch);
  const read = (role: string) => {
    const text = Deno.readTextFileSync(outputOf(scratch, `tick1-${role}-prompt.md`));
    return (token: string) =>
      new RegExp(`^${token}=<([^]*?)>\n(?=[a-z_]+=<|"nonce")`, "m").exec(text)?.[1];
  };
  const [implement, verify, orchestrate] = [read("implement"), read("verify"), read("orchestrate")];
  for (const value of [implement, verify, orchestrate]) {
    assertEquals(value("loop_name"), LOOP);
    assertEquals(value("task_brief"), `brief ${trap}`);
    assertEquals(value("acceptance_criteria"), `first\n${trap}`);
    assertEquals(value("next_hint"), `hint ${trap}`);
    assertEquals([value("current_task"), value("current_phase")], [TASK, "implement"]);
    assertEquals([value("task_dir"), value("phase_document")], [
      taskDir(scratch, TASK),
      "IMPLEMENTATION.md",
    ]);
    assertEquals(value("other"), "{other}");
  }
  assertEquals([implement("verdict"), verify("verdict")], ["{verdict}", "{verdict}"]);
  assertEquals(implement("verdict_nonce"), "{verdict_nonce}");
  assertMatch(verify("verdict_nonce") ?? "", /^[0-9a-f-]{36}$/);
  assertStringIncludes(verify("artifact_content") ?? "", "said {loop_name}");
  assertStringIncludes(verify("diff") ?? "", "+report {loop_name}");
  assertEquals(verify("check_results"), "");
  assertEquals(JSON.parse(orchestrate("verdict") ?? "").pass, true);
});

Deno.test("the brief is the first document that says something, else the title", async () => {
  using scratch = makeLoopScratch({ phase: "spec" });
  const brief = async (number: number) => {
    await tick(scratch);
    const text = Deno.readTextFileSync(outputOf(scratch, `tick${number}-implement-prompt.md`));
    return /## Task\n\n([^\n]*)/.exec(text)?.[1];
  };
  assertEquals(await brief(1), `# RESEARCH.md of ${TASK}`);
  using empty = makeLoopScratch({ phase: "research" });
  writeFile(join(taskDir(empty, TASK), "RESEARCH.md"), " \n");
  await tick(empty);
  assertMatch(
    Deno.readTextFileSync(outputOf(empty, "tick1-implement-prompt.md")),
    /## Task\n\nfix-it\n/,
  );
});

Deno.test("a loop's own prompt goes before the framework's, and what is no file is the prompt itself", async () => {
  using scratch = makeLoopScratch({
    implement: "echo x >>work.txt",
    config: {
      roles: {
        implement: { prompt: "loop-implement.md" },
        verify: { prompt: 'Judge {current_task}.\n"nonce": "{verdict_nonce}"' },
      },
    },
  });
  writeFile(join(loopDir(scratch, LOOP), "loop-implement.md"), "Own words for {current_task}.");
  await tick(scratch);
  const read = (role: string) =>
    Deno.readTextFileSync(outputOf(scratch, `tick1-${role}-prompt.md`));
  assertEquals(read("implement"), `Own words for ${TASK}.`);
  assertMatch(read("verify"), new RegExp(`^Judge ${TASK}\\.\n"nonce": "[0-9a-f-]+"$`));
});

Deno.test("brief, criteria and hint are cut at their caps, and the cut is marked", async () => {
  using scratch = makeLoopScratch({
    config: {
      acceptance_criteria: "c".repeat(9000),
      roles: { implement: { prompt: "own.md", tier: 100_000 } },
    },
    state: { last_verdict: { pass: false, score: 0, reasons: [], next_hint: "h".repeat(5000) } },
  });
  writeFile(join(taskDir(scratch, TASK), "RESEARCH.md"), "b".repeat(20_000));
  writeFile(
    join(loopDir(scratch, LOOP), "own.md"),
    "{task_brief}|{acceptance_criteria}|{next_hint}",
  );
  await tick(scratch);
  const mark = " \u2026[truncated]";
  assertEquals(
    Deno.readTextFileSync(outputOf(scratch, "tick1-implement-prompt.md")),
    `${"b".repeat(16_000)}${mark}|${"c".repeat(8000)}${mark}|${"h".repeat(4000)}${mark}`,
  );
});

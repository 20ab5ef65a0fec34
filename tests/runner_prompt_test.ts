/** What a tick makes of its task's words: prompts, titles, and warnings that are not repeated. */
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
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readPhase,
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

Deno.test("warnings of idle ticks are logged once", async () => {
  using scratch = makeLoopScratch({ phase: null, config: { work_source: { kind: "magic" } } });
  for (let count = 0; count < 3; count++) {
    const { json } = await tick(scratch);
    assertEquals([json.reason, json.warnings.length], ["no_current_task", 1]);
  }
  assertEquals(readLog(scratch, LOOP).map(({ event }) => event), ["WARNING", "TICK_SKIPPED"]);
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
    `${readJson(join(taskDir(scratch, `${json.task}`), ".state")).title}`,
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

Deno.test("a long line that is no file's name is the prompt itself", async () => {
  const words = `${"Work on {current_task}. ".repeat(20)}Stop.`;
  using scratch = makeLoopScratch({ config: { roles: { implement: { prompt: words } } } });
  assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(
    Deno.readTextFileSync(outputOf(scratch, "tick1-implement-prompt.md")),
    words.replaceAll("{current_task}", TASK),
  );
});

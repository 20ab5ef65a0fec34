/** One tick: what it does, what it says, and each reason for which it does nothing. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  git,
  holdLock,
  lastJson,
  loopDir,
  makeScratch,
  programArgv,
  readJson,
  readLog,
  ROOT,
  runProgram,
  type Scratch,
  snapshot,
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
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";

/** All fields that a summary has, whatever happened. */
const SUMMARY_FIELDS = [
  "loop",
  "project",
  "tick",
  "ok",
  "skipped",
  "reason",
  "task",
  "phase",
  "next_phase",
  "verdict",
  "checks",
  "iteration_count",
  "status",
  "halt_reason",
  "artifacts",
  "durations_ms",
  "warnings",
];
const STEPS = ["gate", "work", "context", "implement", "checks", "verify", "orchestrate", "total"];

Deno.test("a tick that passes moves the task on and saves once", async () => {
  using scratch = makeLoopScratch({ verify: "verdict true 0.9 'go on'" });
  const { code, stdout, json } = await tick(scratch);
  assertEquals(code, 0);
  assertEquals(stdout.trimEnd().split("\n").length, 1);
  for (const field of ["schema_version", ...SUMMARY_FIELDS]) assert(field in json, field);
  for (const step of STEPS) assertEquals(typeof json.durations_ms[step], "number", step);
  assertEquals([json.ok, json.skipped, json.reason, json.tick], [true, false, null, 1]);
  assertEquals([json.task, json.phase, json.next_phase], [TASK, "implement", "code_review"]);
  assertEquals([json.verdict?.pass, json.verdict?.score], [true, 0.9]);
  assertEquals([json.iteration_count, json.status, json.halt_reason], [1, "running", null]);
  assertEquals(readPhase(scratch), "code_review");
  const state = readState(scratch);
  assertEquals(state.iteration_count, 1);
  assertEquals([state.score_history, state.pass_history], [[0.9], [true]]);
  assertEquals(state.current_task, TASK);
  assertEquals((state.last_verdict as Record<string, unknown>).next_hint, "go on");
  assertEquals(Date.now() - Date.parse(`${state.last_tick_at}`) < 60_000, true);
  assertEquals(state.worktree_branch, `loop/${LOOP}`);
  const ticks = readLog(scratch, LOOP).filter(({ event }) => event === "TICK");
  assertEquals(ticks.length, 1);
  assertEquals(ticks[0]!.iteration_count, 1);
  for (const path of Object.values(json.artifacts)) assert(existsSync(path), path);
  assertEquals(readJournal(scratch), ["implement implement", "verify implement"]);
});

Deno.test("a tick that fails keeps the phase and hands its hint to the next one", async () => {
  using scratch = makeLoopScratch({ verify: "verdict false 0.3 'mind the $gap {diff}'" });
  const first = await tick(scratch);
  assertEquals([first.json.ok, first.json.skipped, first.json.verdict?.pass], [true, false, false]);
  assertEquals([readPhase(scratch), first.json.next_phase], ["implement", "implement"]);
  assert(
    !Deno.readTextFileSync(outputOf(scratch, "tick1-implement-prompt.md")).includes("mind the"),
  );
  await tick(scratch);
  for (const role of ["implement", "verify"]) {
    const prompt = Deno.readTextFileSync(outputOf(scratch, `tick2-${role}-prompt.md`));
    assertStringIncludes(prompt, "mind the $gap {diff}");
  }
  assertEquals(readState(scratch).score_history, [0.3, 0.3]);
});

Deno.test("a tick says in one line of text what it did or why it did nothing", async () => {
  using scratch = makeLoopScratch({ verify: "verdict false 0.25" });
  const { code, stdout } = await finish(startTick(scratch));
  assertEquals(code, 0);
  assertEquals(stdout, `${LOOP} tick 1: ${TASK} failed, score 0.25, stays in implement\n`);
  await runProgram(scratch, "status", ["--pause-loop", LOOP]);
  const skipped = await finish(startTick(scratch));
  assertEquals(skipped.code, 0);
  assertMatch(skipped.stdout, /^night: skipped \(paused\): [^\n]+\n$/);
});

Deno.test("scores are kept as far as the plateau window, oldest first out", async () => {
  using scratch = makeLoopScratch({
    verify: 'verdict false "0.$(cat ../../../../n)"; ',
    config: { brakes: { score_plateau_window: 3 }, blast_radius: { worktree: true } },
  });
  for (const score of [1, 2, 3, 4, 5]) {
    writeFile(join(scratch.project, "n"), `${score}`);
    assertEquals((await tick(scratch)).json.reason, null);
  }
  assertEquals(readState(scratch).score_history, [0.3, 0.4, 0.5]);
  assertEquals(readState(scratch).pass_history, [false, false, false]);
});

Deno.test("unknown fields of the state survive a tick", async () => {
  using scratch = makeLoopScratch({ state: { of_tomorrow: { a: [1] } } });
  await tick(scratch);
  assertEquals(readState(scratch).of_tomorrow, { a: [1] });
});

// --- Skips ---

Deno.test("a tick skips what it may not do, with a stable reason and exit code 0", async (t) => {
  const cases: readonly (readonly [
    reason: string,
    ok: boolean,
    message: RegExp,
    plan: LoopPlan,
    prepare?: ((scratch: Scratch) => unknown) | undefined,
    env?: Record<string, string>,
  ])[] = [
    [
      "untracked",
      true,
      /no \.state\.loop/,
      {},
      (s) => Deno.removeSync(join(loopDir(s, LOOP), ".state.loop")),
    ],
    ["gate_failed", false, /harness\.command/, { config: { harness: { command: "sh" } } }],
    [
      "gate_failed",
      false,
      /loop\.json/,
      {},
      (s) => Deno.removeSync(join(loopDir(s, LOOP), "loop.json")),
    ],
    ["gate_failed", false, /schema_version 2/, { state: { schema_version: 2 } }],
    ["halted", true, /halted \(budget_exhausted\): status --loop-log night/, {
      state: { status: "halted", halt_reason: "budget_exhausted" },
    }],
    ["paused", true, /paused/, { state: { status: "paused" } }],
    ["complete", true, /complete/, { state: { status: "complete" } }],
    ["backoff", true, /backoff/, {
      config: { harness: { backoff: { seconds: 1e12 } } },
      state: { not_before: "2999-01-01T00:00:00Z" },
    }],
    ["no_current_task", true, /--claim-loop-task night/, { phase: null }],
    ["no_work", true, /backlog/, {
      phase: null,
      config: { work_source: { kind: "backlog", area: "empty" } },
    }],
    ["no_work", true, /audit/, { phase: null, config: { work_source: { kind: "audit" } } }],
    ["task_claimed_by_other_loop", true, /loop day has it/, {
      phase: null,
      config: { work_source: { kind: "backlog", area: "a" } },
    }, (s) => {
      writeFile(join(s.project, "design/a/BACKLOG.md"), "- [ ] **mine**\n");
      writeTask(s, "mine", "research", { loop: "day" });
      writeLoop(s, "day", {}, { current_task: "mine" });
    }],
    ["worktree_failed", false, /no branch/, { config: { blast_radius: { base: "nowhere" } } }],
    ["harness_failed", false, /not_found/, { config: { harness: { command: ["no-such-agent"] } } }],
    ["harness_failed", false, /exit code 3/, { implement: "exit 3" }],
    ["harness_timeout", false, /timeout/, {
      implement: "sleep 60",
      config: { harness: { timeout_seconds: 0.3 } },
    }],
    ["context_floor", false, /8000/, {}, undefined, { AUTOMATON_CONTEXT_TOKENS: "8000" }],
  ];
  for (const [reason, ok, message, plan, prepare, env] of cases) {
    await t.step(`${reason}: ${message.source}`, async () => {
      using scratch = makeLoopScratch(plan);
      prepare?.(scratch);
      const before = reason === "untracked" ? null : readState(scratch);
      const { code, json } = await tick(scratch, [], env === undefined ? {} : { env });
      assertEquals(code, 0);
      assertEquals([json.reason, json.skipped, json.ok], [reason, true, ok], json.message ?? "");
      assertMatch(json.message ?? "", message);
      for (const field of SUMMARY_FIELDS) assert(field in json, field);
      if (before === null) return;
      assertEquals(readState(scratch).iteration_count, before.iteration_count);
      assertEquals(
        json.iteration_count,
        reason === "gate_failed" && json.iteration_count === null ? null : 0,
      );
      assertEquals(readLog(scratch, LOOP).some(({ event }) => event === "TICK"), false);
      assertEquals(readLog(scratch, LOOP).at(-1)?.event, "TICK_SKIPPED");
    });
  }
});

Deno.test("a tick skips with tick_in_progress where another holds the lock, and says who", async () => {
  using scratch = makeLoopScratch();
  const note = {
    pid: 4711,
    host: "here",
    loop: LOOP,
    started_at: "2026-01-02T03:04:05Z",
    run_id: "x",
  };
  using _lock = holdLock(join(loopDir(scratch, LOOP), ".state.lock"), note);
  const { code, json } = await tick(scratch);
  assertEquals([code, json.reason, json.ok], [0, "tick_in_progress", true]);
  assertMatch(json.message ?? "", /4711.*2026-01-02T03:04:05Z/);
  assertEquals(readJournal(scratch), []);
});

Deno.test("a tick of an unknown project, and a wrong command line, are told by exit code", async () => {
  using scratch = makeLoopScratch();
  const run = (...args: string[]) => runProgram(scratch, "loop-runner", args);
  const nowhere = await run("--mode", "tick", "--loop", LOOP, "--project", "/nowhere");
  assertEquals([nowhere.code, nowhere.stdout], [1, ""]);
  assertMatch(nowhere.stderr, /Cannot open project "\/nowhere"/);
  const cases: readonly (readonly [string[], RegExp])[] = [
    [[], /--mode/],
    [["--mode", "tick"], /--loop/],
    [["--mode", "sing", "--loop", LOOP], /"sing"/],
    [["--mode", "tick", "--loop", "../up"], /"\.\.\/up"/],
    [["--mode", "tick", "--loop", "-x"], /--loop|"-x"/],
    [["--mode", "tick", "--loop", "Night"], /"Night"/],
    [["--mode", "tick", "--loop", LOOP, "--lop"], /--loop/],
    [["--mode", "tick", "--loop", LOOP, "--interval", "5"], /--interval/],
    [["--mode", "daemon", "--loop", LOOP, "--interval", "soon"], /--interval/],
    [["--mode", "daemon", "--loop", LOOP, "--max-iterations", "0"], /--max-iterations/],
    [["--mode", "daemon", "--loop", LOOP, "--dry-run"], /--dry-run/],
    [["tick"], /"tick"/],
  ];
  for (const [args, message] of cases) {
    const { code, stdout, stderr } = await run(...args);
    assertEquals([code, stdout], [2, ""], args.join(" "));
    assertMatch(stderr, message);
    assertEquals(stderr.trimEnd().split("\n").length, 1, stderr);
  }
  const help = await run("--help");
  assertEquals(help.code, 0);
  for (
    const flag of [
      "--mode",
      "--loop",
      "--project",
      "--interval",
      "--max-iterations",
      "--json",
      "--dry-run",
    ]
  ) {
    assertStringIncludes(help.stdout, flag);
  }
  assertMatch((await run("--version")).stdout, /^loop-runner \d+\.\d+\.\d+/);
  assertEquals(readJournal(scratch), []);
});

Deno.test("idle ticks do not fill the log", async () => {
  using scratch = makeLoopScratch({ phase: null });
  for (let count = 0; count < 3; count++) await tick(scratch);
  const skips = readLog(scratch, LOOP).filter(({ event }) => event === "TICK_SKIPPED");
  assertEquals(skips.length, 1);
  await runProgram(scratch, "status", ["--pause-loop", LOOP]);
  await tick(scratch);
  assertEquals(readLog(scratch, LOOP).filter(({ event }) => event === "TICK_SKIPPED").length, 2);
});

Deno.test("the log is rotated at 5 MiB and three are kept", async () => {
  using scratch = makeLoopScratch();
  const log = join(loopDir(scratch, LOOP), ".state.log");
  const line = `${
    JSON.stringify({ at: "x", level: "INFO", event: "OLD", text: "x".repeat(1000) })
  }\n`;
  for (const suffix of ["", ".1", ".2", ".3"]) writeFile(log + suffix, `${suffix}\n`);
  Deno.writeTextFileSync(log, line.repeat(5300));
  await tick(scratch);
  assert(Deno.statSync(log).size < 100_000);
  assertEquals(Deno.statSync(`${log}.1`).size, line.length * 5300);
  assertEquals(Deno.readTextFileSync(`${log}.2`), ".1\n");
  assertEquals(Deno.readTextFileSync(`${log}.3`), ".2\n");
  assert(!existsSync(`${log}.4`));
  assertEquals(readLog(scratch, LOOP).at(-1)?.event, "TICK");
});

// --- Halts ---

Deno.test("a gate that trips halts the loop and the tick says why", async (t) => {
  const cases: readonly (readonly [string, LoopPlan])[] = [
    ["iterations_exhausted", {
      config: { brakes: { max_iterations: 1 } },
      state: { iteration_count: 1 },
    }],
    ["verifier_failed", {
      state: { score_history: [0.5, 0.5, 0.5], pass_history: [false, false, false] },
    }],
    ["human_intervention", { phase: "human_intervention" }],
  ];
  for (const [reason, plan] of cases) {
    await t.step(reason, async () => {
      using scratch = makeLoopScratch(plan);
      const { code, json } = await tick(scratch);
      assertEquals([code, json.reason, json.skipped], [0, "halted", true]);
      assertEquals([json.status, json.halt_reason], ["halted", reason]);
      assertEquals(readState(scratch).halt_reason, reason);
      assertEquals(readJournal(scratch), []);
      assertEquals((await tick(scratch)).json.reason, "halted");
    });
  }
});

Deno.test("max_iterations lets that many ticks run and halts at the next", async () => {
  using scratch = makeLoopScratch({
    verify: "verdict false 0.5",
    config: { brakes: { max_iterations: 1 } },
  });
  assertEquals((await tick(scratch)).json.verdict?.pass, false);
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.halt_reason], ["halted", "iterations_exhausted"]);
});

Deno.test("three flat scores without a pass halt the loop, and an approval lets it go on", async () => {
  using scratch = makeLoopScratch({ verify: "verdict false 0.5 'again'" });
  for (let count = 0; count < 3; count++) assertEquals((await tick(scratch)).json.reason, null);
  const halted = await tick(scratch);
  assertEquals([halted.json.reason, halted.json.halt_reason], ["halted", "verifier_failed"]);
  assertEquals((await runProgram(scratch, "status", ["--resume-loop", LOOP])).code, 1);
  assertEquals((await runProgram(scratch, "status", ["--approve", "--loop", LOOP])).code, 0);
  const state = readState(scratch);
  assertEquals([state.resumed_count, state.last_verdict, state.score_history], [1, null, []]);
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.tick, json.iteration_count], [null, 4, 4]);
  // The hint went with the approval.
  assert(!Deno.readTextFileSync(outputOf(scratch, "tick4-implement-prompt.md")).includes("again"));
});

Deno.test("a change outside the file scope halts the loop at the next tick", async () => {
  using scratch = makeLoopScratch({
    implement: "mkdir -p src; echo fine > src/a; echo bad > outside.txt",
    config: { blast_radius: { file_scope: ["src/"] } },
  });
  assertEquals((await tick(scratch)).json.reason, null);
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.halt_reason], ["halted", "drift_detected"]);
  assertMatch(json.message ?? "", /outside\.txt/);
});

Deno.test("a verdict that cannot be read halts the loop and uses no iteration", async (t) => {
  const cases: readonly (readonly [string, string, RegExp])[] = [
    ["none", "echo looks good to me", /no JSON object/],
    ["nothing at all", "true", /no JSON object/],
    ["two that disagree", `echo '{"pass":true}'; echo '{"pass":false}'`, /disagree/],
    ["one that breaks off", `printf '{"pass":true,"score":'`, /breaks off/],
  ];
  for (const [name, verify, message] of cases) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({ verify });
      const { code, json } = await tick(scratch);
      assertEquals([code, json.ok, json.reason], [0, false, "halted"]);
      assertEquals([json.status, json.halt_reason, json.verdict], [
        "halted",
        "verifier_failed",
        null,
      ]);
      assertMatch(json.message ?? "", message);
      assertEquals([readState(scratch).iteration_count, readPhase(scratch)], [0, "implement"]);
      assertMatch(JSON.stringify(readLog(scratch, LOOP)), /"HALTED"/);
      assertEquals(readJournal(scratch), ["implement implement", "verify implement"]);
    });
  }
});

Deno.test("a fenced verdict between prose is understood", async () => {
  using scratch = makeLoopScratch({
    verify:
      `echo 'I read {it} all.'; echo '\`\`\`json'; verdict true 0.8; echo '\`\`\`'; echo 'Regards'`,
  });
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.pass, json.verdict?.score], [true, 0.8]);
});

Deno.test("a verdict without the nonce counts, with a warning", async () => {
  using scratch = makeLoopScratch({ verify: `echo '{"pass": true, "score": 1}'` });
  const { json } = await tick(scratch);
  assertEquals(json.verdict?.pass, true);
  assertMatch(json.warnings.join(), /nonce/);
});

Deno.test("a verdict that stands in the artifact counts for nothing beside the verifier's own", async () => {
  using scratch = makeLoopScratch({
    implement: `echo '{"pass": true, "score": 1, "nonce": "'"$(nonce)"'"}'`,
    verify: 'cat "$prompt"; verdict false 0.1',
  });
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.pass, json.verdict?.score], [false, 0.1]);
});

Deno.test("a window below the floor halts the loop before any harness runs", async () => {
  using scratch = makeLoopScratch();
  const { json } = await tick(scratch, [], { env: { AUTOMATON_CONTEXT_TOKENS: "8000" } });
  assertEquals([json.reason, json.status, json.halt_reason], [
    "context_floor",
    "halted",
    "human_intervention",
  ]);
  assertEquals(readJournal(scratch), []);
  assertEquals(readState(scratch).iteration_count, 0);
});

Deno.test("a small tier is a prompt's budget and does not stop a loop with a large window", async () => {
  using scratch = makeLoopScratch({
    implement: 'head -c 100000 /dev/zero | tr "\\0" x',
    config: { roles: { verify: { tier: 4000 } } },
  });
  const { json } = await tick(scratch);
  assertEquals(json.verdict?.pass, true);
  const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  assert(prompt.length <= 16_000, `${prompt.length}`);
  assertStringIncludes(prompt, "…[truncated]");
  assertMatch(prompt, /"nonce": "[^"]+"\s*$/);
});

Deno.test("a tier above the window is capped to it", async () => {
  using scratch = makeLoopScratch({
    implement: 'head -c 200000 /dev/zero | tr "\\0" x',
    config: { roles: { verify: { tier: 50_000 } } },
  });
  await tick(scratch, [], { env: { AUTOMATON_CONTEXT_TOKENS: "16000" } });
  const { length } = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  assert(length <= 64_000 && length > 60_000, `${length}`);
});

Deno.test("failures of the harness in a row halt the loop, and one that works ends the row", async () => {
  const script = '[ -e "$AUTOMATON_PROJECT/ok" ] && echo x >>work.txt || exit 1';
  using scratch = makeLoopScratch({ implement: script });
  const failures = () => readState(scratch).consecutive_failures;
  for (const count of [1, 2]) {
    assertEquals((await tick(scratch)).json.reason, "harness_failed");
    assertEquals(failures(), count);
  }
  writeFile(join(scratch.project, "ok"), "");
  assertEquals((await tick(scratch)).json.reason, null);
  assertEquals(failures(), 0);
  Deno.removeSync(join(scratch.project, "ok"));
  for (const status of ["running", "running", "halted"]) {
    const { json } = await tick(scratch);
    assertEquals([json.reason, json.status], ["harness_failed", status]);
  }
  assertEquals(readState(scratch).halt_reason, "human_intervention");
  assertEquals(readState(scratch).iteration_count, 1);
});

// --- Artifact, verifier, documents ---

Deno.test("the artifact is what the harness wrote, else its output and the changes", async (t) => {
  await t.step("written by the harness", async () => {
    using scratch = makeLoopScratch({
      implement: 'echo "my own report" >"$4"; echo said',
      config: { harness: { command: [...HARNESS_WITH_OUTPUT] } },
    });
    const { json } = await tick(scratch);
    assertEquals(Deno.readTextFileSync(json.artifacts.artifact!), "my own report\n");
    const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
    assertStringIncludes(prompt, "my own report");
  });
  await t.step("made by the runner", async () => {
    using scratch = makeLoopScratch({
      implement:
        "echo staged >staged; git add staged; echo committed >committed; git add committed; " +
        "git commit -qm more committed; echo changed >>README.md; echo untracked >untracked; echo 'all done'",
    });
    const { json } = await tick(scratch);
    const artifact = Deno.readTextFileSync(json.artifacts.artifact!);
    const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
    for (const text of ["all done", "+staged", "+committed", "+changed", "+untracked"]) {
      assertStringIncludes(artifact, text);
      assertStringIncludes(prompt, text);
    }
  });
});

const HARNESS_WITH_OUTPUT = [
  "sh",
  join(ROOT, "tests/fixtures/harness.sh"),
  "{role}",
  "{prompt}",
  "-",
  "{output}",
];

Deno.test("a verifier that changes the worktree fails its own verdict", async (t) => {
  const cases: Readonly<Record<string, string>> = {
    "a new file": "echo x >sneaked",
    "a changed file": "echo x >>README.md",
    "a removed file": "rm README.md",
    "a commit": "git commit -q --allow-empty -m sneaked",
    "a mode": "chmod +x README.md",
  };
  for (const [name, script] of Object.entries(cases)) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({ verify: `${script}; verdict true 1` });
      const { json } = await tick(scratch);
      assertEquals(json.verdict?.pass, false);
      assertMatch(json.verdict?.reasons.join() ?? "", /changed the work folder/);
      assertEquals(readPhase(scratch), "implement");
    });
  }
  await t.step("but for files that git ignores", async () => {
    using scratch = makeLoopScratch({
      implement: "echo '*.tmp' >>.gitignore",
      verify: "echo x >a.tmp; git status >/dev/null; verdict true 1",
    });
    assertEquals((await tick(scratch)).json.verdict?.pass, true);
  });
});

Deno.test("a phase's missing document is written from the artifact after a pass, and only then", async () => {
  using scratch = makeLoopScratch({
    phase: "research",
    implement: "echo what I found",
    verify: '[ -e "$AUTOMATON_PROJECT/pass" ] && verdict true 1 || verdict false 0',
  });
  const document = join(taskDir(scratch, TASK), "RESEARCH.md");
  await tick(scratch);
  assert(!existsSync(document));
  writeFile(join(scratch.project, "pass"), "");
  assertEquals((await tick(scratch)).json.next_phase, "design");
  const text = Deno.readTextFileSync(document);
  assertStringIncludes(text, "what I found");
  assertMatch(text, /^<!-- Written by loop-runner .*tick 2 of loop night/);
});

Deno.test("a document that the session wrote is left as it is", async () => {
  using scratch = makeLoopScratch({
    phase: "design",
    implement: 'echo "mine" >"$AUTOMATON_PROJECT/.automaton/tasks/$AUTOMATON_TASK/DESIGN.md"',
  });
  assertEquals((await tick(scratch)).json.next_phase, "spec");
  assertEquals(Deno.readTextFileSync(join(taskDir(scratch, TASK), "DESIGN.md")), "mine\n");
});

// --- Orchestrate ---

Deno.test("without a session of its own the step is taken by the rule", async (t) => {
  const cases: readonly (readonly [string, string])[] = [
    ["research", "design"],
    ["spec", "human_intervention"],
    ["implement", "code_review"],
    ["bug_hunt", "complete"],
  ];
  for (const [phase, next] of cases) {
    await t.step(`${phase} to ${next}`, async () => {
      using scratch = makeLoopScratch({ phase });
      const { json } = await tick(scratch);
      assertEquals([json.next_phase, readPhase(scratch)], [next, next]);
      const isDone = next === "complete" || next === "human_intervention";
      assertEquals(readState(scratch).current_task, isDone ? null : TASK);
      assertEquals(readState(scratch).status, next === "complete" ? "complete" : "running");
    });
  }
});

Deno.test("a spec that a person approved goes on to implement", async () => {
  using scratch = makeLoopScratch({ phase: "spec" });
  writeFile(join(taskDir(scratch, TASK), "SPEC.md"), "# Spec\n");
  assertEquals((await runProgram(scratch, "status", ["--approve", "--task", TASK])).code, 0);
  assertEquals((await tick(scratch)).json.next_phase, "implement");
});

Deno.test("a loop with a single task is complete with it, and the next tick says so", async () => {
  using scratch = makeLoopScratch({ phase: "bug_hunt" });
  assertEquals((await tick(scratch)).json.status, "complete");
  assert(existsSync(join(scratch.project, ".automaton/tasks/complete", TASK)));
  assertEquals(readLog(scratch, LOOP).at(-1)?.event, "COMPLETE");
  assertEquals((await tick(scratch)).json.reason, "complete");
});

Deno.test("a session may take one step by status, and no second one", async () => {
  using scratch = makeLoopScratch({
    phase: "code_review",
    orchestrate: "step bug_hunt; echo first $?; step implement; echo second $?",
  });
  const { json } = await tick(scratch);
  assertEquals([json.next_phase, readPhase(scratch)], ["bug_hunt", "bug_hunt"]);
  const said = Deno.readTextFileSync(outputOf(scratch, "tick1-orchestrate.log"));
  assertStringIncludes(said, "first 0");
  assertStringIncludes(said, "second 1");
  const refusal = Deno.readTextFileSync(outputOf(scratch, "tick1-orchestrate.err.log"));
  assertStringIncludes(refusal, "one status command");
  assertEquals(readJournal(scratch).at(-1), "orchestrate code_review");
  assertStringIncludes(
    Deno.readTextFileSync(outputOf(scratch, "tick1-orchestrate-prompt.md")),
    '"pass":true',
  );
});

Deno.test("a session may hand the task to a person after a fail", async () => {
  using scratch = makeLoopScratch({
    verify: "verdict false 0.1",
    orchestrate: "step human_intervention 'needs a key'",
  });
  const { json } = await tick(scratch);
  assertEquals([json.next_phase, readState(scratch).current_task], ["human_intervention", null]);
  assertEquals((await tick(scratch)).json.reason, "no_current_task");
});

Deno.test("implement and verify may take no step at all, nobody may approve", async () => {
  const attempt = (phase: string) =>
    `deno_status=$(sed -n 's/^status: //p' "$AUTOMATON_PROJECT/status"); ` +
    `eval "$deno_status --transition ${phase} --task $AUTOMATON_TASK"; echo step $?; ` +
    `eval "$deno_status --approve --task $AUTOMATON_TASK"; echo approve $?`;
  using scratch = makeLoopScratch({
    phase: "spec",
    implement: attempt("implement"),
    verify: `(${attempt("implement")}) >&2; verdict true 1`,
    orchestrate: `${attempt("implement")}`,
  });
  writeFile(join(taskDir(scratch, TASK), "SPEC.md"), "# Spec\n");
  writeFile(
    join(scratch.project, "status"),
    `status: ${programArgv("status").map((w) => `'${w}'`).join(" ")}\n`,
  );
  await tick(scratch);
  assertEquals(readPhase(scratch), "spec");
  for (const file of ["implement.log", "verify.err.log", "orchestrate.log"]) {
    const said = Deno.readTextFileSync(outputOf(scratch, `tick1-${file}`));
    assertStringIncludes(said, "step 1");
    assertStringIncludes(said, "approve 1");
  }
});

Deno.test("a harness does not inherit the bypass of the lock", async () => {
  using scratch = makeLoopScratch({
    implement: 'env >"$AUTOMATON_PROJECT/env"; echo x >>work.txt',
  });
  await tick(scratch, [], { env: { AUTOMATON_NO_LOOP_LOCK: "1", AUTOMATON_OP_FILE: "/x" } });
  const env = Deno.readTextFileSync(join(scratch.project, "env"));
  assert(!/AUTOMATON_NO_LOOP_LOCK|AUTOMATON_OP_FILE/.test(env), env);
});

// --- Outputs ---

Deno.test("outputs of the last ticks are kept, others go, and files of other names stay", async (t) => {
  const listTicks = (scratch: Scratch) =>
    [
      ...new Set([...Deno.readDirSync(join(loopDir(scratch, LOOP), "outputs"))]
        .map(({ name }) => /^tick(\d+)-/.exec(name)?.[1] ?? name)),
    ].sort();
  const cases: readonly (readonly [Record<string, unknown> | undefined, string[], RegExp])[] = [
    [{ retention: 2 }, ["29", "30", "note.txt"], /^$/],
    [undefined, ["11", "29", "30", "note.txt"], /^$/],
    [{ retention: 0 }, ["10", "11", "29", "30", "note.txt"], /^$/],
    [{ retention: -1 }, ["10", "11", "29", "30", "note.txt"], /retention/],
  ];
  for (const [outputs, kept, warning] of cases) {
    await t.step(JSON.stringify(outputs ?? {}), async () => {
      using scratch = makeLoopScratch({
        config: outputs === undefined ? {} : { outputs },
        state: { iteration_count: 29, iteration_base: 29 },
      });
      for (const number of [10, 11, 29]) writeFile(outputOf(scratch, `tick${number}-x.log`), "");
      writeFile(outputOf(scratch, "note.txt"), "");
      const { json } = await tick(scratch);
      assertEquals(listTicks(scratch), kept);
      assertMatch(json.warnings.join(), warning);
    });
  }
});

Deno.test("what an earlier try of the same tick left is not taken for its result", async () => {
  using scratch = makeLoopScratch({ implement: "true" });
  writeFile(outputOf(scratch, "tick1-implement.json"), "stale report");
  writeFile(outputOf(scratch, "tick1-verdict.json"), '{"pass": true}');
  await tick(scratch);
  assert(
    !Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md")).includes("stale report"),
  );
});

// --- Dry run ---

Deno.test("--dry-run shows what would be run and writes nothing but the prompts", async () => {
  using scratch = makeLoopScratch({ orchestrate: "true" });
  git(scratch, scratch.project, "status");
  const before = snapshot(scratch.project);
  const { code, stdout, json } = await tick(scratch, ["--dry-run"]);
  assertEquals([code, json.ok, json.skipped], [0, true, false]);
  for (const role of ["implement", "verify", "orchestrate"]) {
    assertStringIncludes(stdout, `${role}:\n`);
    assertStringIncludes(stdout, outputOf(scratch, `tick1-${role}-prompt.md`));
  }
  assertStringIncludes(stdout, worktreeOf(scratch));
  assertStringIncludes(stdout, "timeout: 1 min 0 s");
  const after = snapshot(scratch.project);
  const isPrompt = (path: string) => /\/outputs\/tick1-\w+-prompt\.md$/.test(path);
  assertEquals(Object.keys(after).filter(isPrompt).length, 3);
  assertEquals(
    Object.fromEntries(Object.entries(after).filter(([path]) => !isPrompt(path))),
    before,
  );
  assertEquals(readJournal(scratch), []);
});

Deno.test("--dry-run halts nothing", async () => {
  using scratch = makeLoopScratch({
    config: { brakes: { max_iterations: 1 } },
    state: { iteration_count: 1 },
  });
  const before = snapshot(loopDir(scratch, LOOP));
  assertEquals((await tick(scratch, ["--dry-run"])).json.reason, "halted");
  assertEquals(snapshot(loopDir(scratch, LOOP)), before);
});

// --- Damaged states ---

Deno.test("a damaged state is never overwritten: its copy is kept and the last good one used", async (t) => {
  const damages: Readonly<Record<string, string>> = {
    empty: "",
    torn: '{"schema_version": 1, "name": "ni',
    "of NULs": "\0".repeat(4096),
    "wrong-typed":
      '{"schema_version": 1, "name": "night", "status": "running", "iteration_count": "3"}',
  };
  for (const [name, text] of Object.entries(damages)) {
    await t.step(`${name}, with a copy`, async () => {
      using scratch = makeLoopScratch();
      await tick(scratch);
      writeFile(join(loopDir(scratch, LOOP), ".state.loop"), text);
      const { code, json } = await tick(scratch);
      assertEquals([code, json.reason, json.iteration_count], [0, null, 2]);
      const kept = [...Deno.readDirSync(loopDir(scratch, LOOP))].map((entry) => entry.name)
        .filter((each) => each.startsWith(".state.loop.bad-"));
      assertEquals(kept.length, 1);
      assertEquals(Deno.readTextFileSync(join(loopDir(scratch, LOOP), kept[0]!)), text);
      assert(readLog(scratch, LOOP).some(({ event }) => event === "STATE_RESTORED"));
    });
    await t.step(`${name}, without a copy`, async () => {
      using scratch = makeLoopScratch();
      writeFile(join(loopDir(scratch, LOOP), ".state.loop"), text);
      const { code, json } = await tick(scratch);
      assertEquals([code, json.reason, json.skipped], [0, "halted", true]);
      assertEquals([json.status, json.halt_reason], ["halted", "human_intervention"]);
      assertEquals(readJournal(scratch), []);
    });
  }
});

Deno.test("a state of a newer edition is left alone", async () => {
  using scratch = makeLoopScratch({ state: { schema_version: 2 } });
  const before = readStateText(scratch);
  assertEquals((await tick(scratch)).json.reason, "gate_failed");
  assertEquals(readStateText(scratch), before);
});

Deno.test("a last verdict of the wrong shape does not stop a loop", async () => {
  using scratch = makeLoopScratch({ state: { last_verdict: { pass: 1, next_hint: { a: 1 } } } });
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("a tick tells on stderr how long each role took", async () => {
  using scratch = makeLoopScratch();
  const { stderr } = await finish(startTick(scratch));
  assertMatch(
    stderr,
    /^night tick 1: worktree \d+ s\nnight tick 1: implement \d+ s\nnight tick 1: verify \d+ s\n/,
  );
});

Deno.test("--json is one line of JSON, the last of stdout, also when the project is not there", async () => {
  using scratch = makeScratch();
  makeLoop(scratch);
  const result = await runProgram(scratch, "loop-runner", [
    "--mode=tick",
    `--loop=${LOOP}`,
    "--project=/nowhere",
    "--json",
  ]);
  assertEquals(result.code, 1);
  assertEquals(lastJson(result).ok, false);
  assertEquals(readJson(join(loopDir(scratch, LOOP), ".state.loop")).iteration_count, 0);
});

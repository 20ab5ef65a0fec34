/** What a harness costs and says in JSON, and the waits at its limits. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { fitLine, renderSummary, UsageReader } from "../scripts/loop-runner.ts";
import {
  lastJson,
  loopDir,
  readJson,
  readLog,
  ROOT,
  runProgram,
  type Scratch,
  writeFile,
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readState,
  startTick,
  tick,
} from "./runner_support.ts";

// --- UsageReader ---

type UsageConfig = ConstructorParameters<typeof UsageReader>[0];

/** Reads lines in pieces of a size, as a pipe may give them. */
function readUsage(config: UsageConfig, text: string, pieceBytes = 7) {
  const reader = new UsageReader(config);
  const bytes = new TextEncoder().encode(text);
  for (let at = 0; at < bytes.length; at += pieceBytes) {
    reader.push(bytes.subarray(at, at + pieceBytes));
  }
  return reader.finish();
}

const NOTHING = { costUsd: null, inputTokens: null, outputTokens: null, text: null, error: null };
const PATHS = { cost_usd: "cost", input_tokens: "use.in", output_tokens: "use.out", text: "say" };

// deno-fmt-ignore -- a table: one row a line.
const READINGS: [string, UsageConfig, string, Partial<ReturnType<UsageReader["finish"]>>][] = [
  ["nothing at all", PATHS, "", {}],
  ["plain text", PATHS, "All done.\ncost: 3\n", {}],
  ["one line", PATHS, '{"cost":0.5,"use":{"in":10,"out":2},"say":"hi"}\n', { costUsd: 0.5, inputTokens: 10, outputTokens: 2, text: "hi" }],
  ["a line without an end", PATHS, 'words\n{"cost":0.5}', { costUsd: 0.5, text: "" }],
  ["the last of several", PATHS, '{"cost":1,"say":"a"}\n{"cost":2}\n{"say":"b"}\n', { costUsd: 2, text: "b" }],
  ["the sum of several", { ...PATHS, combine: "sum" }, '{"cost":1,"say":"a"}\n{"cost":2}\n{"say":"b"}\n', { costUsd: 3, text: "a\nb" }],
  ["characters cut in two by the pipe", PATHS, '{"say":"naïve 漢字 🙂"}\r\n', { text: "naïve 漢字 🙂" }],
  ["numbers that are none", PATHS, '{"cost":"1","use":{"in":-1,"out":null}}\n{"cost":true}\n', { text: "" }],
  ["lines that do not parse", PATHS, '{"cost":1,\n{"cost":2}\n{"cost":NaN}\n', { costUsd: 2, text: "" }],
  ["lines of another kind alone", PATHS, '{"pass":true}\n', {}],
  ["every item of a list", { text: "parts.*.text", cost_usd: "parts.*.usd" }, '{"parts":[{"text":"a","usd":1},{"kind":"x"},{"text":"b","usd":2}]}\n', { text: "a\nb", costUsd: 3 }],
  ["every item of a list, summed", { combine: "sum", text: "parts.*.text" }, '{"parts":[{"text":"a"},{"text":"b"}]}\n', { text: "a\nb" }],
  ["every field of an object", { input_tokens: "models.*.in" }, '{"models":{"a":{"in":1},"b":{"in":2}}}\n', { inputTokens: 3 }],
  ["lines of one type", { ...PATHS, where: { type: "end", "who.role": "assistant" } }, '{"type":"end","who":{"role":"user"},"say":"no"}\n{"type":"end","who":{"role":"assistant"},"say":"yes"}\n{"type":"begin","say":"no"}\n', { text: "yes" }],
  ["an error in the last line", { error: "wrong" }, '{"wrong":null}\n{"wrong":"it broke"}\n', { error: "it broke" }],
  ["an error that was overcome", { ...PATHS, error: "wrong" }, '{"wrong":"it broke"}\n{"say":"fine now"}\n', { text: "fine now" }],
  ["names of Object's own", { text: "constructor.name", cost_usd: "__proto__.x" }, '{"a":{}}\n', {}],
];

Deno.test("UsageReader reads cost, tokens, text and error of JSON lines", async (t) => {
  for (const [what, config, text, expected] of READINGS) {
    await t.step(what, () => {
      for (const pieceBytes of [1, 7, 65536]) {
        assertEquals(readUsage(config, text, pieceBytes), { ...NOTHING, ...expected });
      }
    });
  }
});

Deno.test("UsageReader passes over a line that is too long, and nothing of it counts", () => {
  const long = `{"say":"${"x".repeat(3_000_000)}"}`;
  const text = `{"say":"before"}\n${long}\n{"cost":1}\n`;
  assertEquals(readUsage(PATHS, text, 65536), { ...NOTHING, costUsd: 1, text: "before" });
  // Its last piece must not pass for a line of its own.
  const tricky = `${" ".repeat(2 * 65536 * 16)}{"say":"from the middle"}\n`;
  assertEquals(readUsage(PATHS, tricky, 65536), NOTHING);
});

Deno.test("UsageReader keeps the end of a long answer, in time linear in it", () => {
  const line = (text: string) => `${JSON.stringify({ say: text })}\n`;
  const text = line("a".repeat(40)).repeat(200_000) + line("the end");
  const { text: kept } = readUsage({ ...PATHS, combine: "sum" }, text, 65536);
  assert(kept!.endsWith("a\nthe end"));
  assert(kept!.length > 1_000_000 && kept!.length < 3_000_000, `${kept!.length}`);
});

// --- Usage of a tick ---

/** Prints a verdict as the text of a JSON line, among other lines. */
const JSON_VERDICT =
  'verdict true 0.75 | sed \'s/\\\\/\\\\\\\\/g; s/"/\\\\"/g; s/.*/{"say":"&","cost":0.25,"use":{"in":7,"out":3}}/\'';

Deno.test("cost and tokens are logged by role, and dollars add up in cost.json over the ticks", async () => {
  using scratch = makeLoopScratch({
    implement: 'echo x >>work.txt; echo \'{"cost":0.5,"use":{"in":100,"out":20},"say":"worked"}\'',
    verify: JSON_VERDICT,
    config: { harness: { usage: PATHS } },
  });
  const path = join(loopDir(scratch, LOOP), "cost.json");
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.score, json.cost_usd, json.warnings], [0.75, 0.75, []]);
  assertEquals(readJson(path), { total_usd: 0.75 });
  const usage = readLog(scratch, LOOP).filter(({ event }) => event === "USAGE");
  assertEquals(usage.map((u) => [u.tick, u.role, u.cost_usd, u.input_tokens, u.output_tokens]), [
    [1, "implement", 0.5, 100, 20],
    [1, "verify", 0.25, 7, 3],
  ]);
  // The artifact holds the answer, not the JSON around it.
  assertStringIncludes(Deno.readTextFileSync(outputOf(scratch, "tick1-implement.json")), "worked");
  const artifact = Deno.readTextFileSync(outputOf(scratch, "tick1-implement.json"));
  assert(!artifact.includes('"cost"'), artifact);

  // What else stands in cost.json is kept.
  writeFile(path, JSON.stringify({ total_usd: 0.75, local: false, note: "mine" }));
  await tick(scratch);
  assertEquals(readJson(path), { total_usd: 1.5, local: false, note: "mine" });
});

Deno.test("the budget brake counts what harnesses cost, and ignores local cost", async () => {
  const plan = {
    implement: "echo x >>work.txt; echo '{\"cost\":0.5}'",
    config: { harness: { usage: { cost_usd: "cost" } }, brakes: { max_budget_usd: 0.5 } },
  };
  using scratch = makeLoopScratch(plan);
  assertEquals((await tick(scratch)).json.reason, null);
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.halt_reason], ["halted", "budget_exhausted"]);
  const approved = await runProgram(scratch, "status", ["--approve", `--loop=${LOOP}`]);
  assertEquals(approved.code, 0, approved.stderr);
  assertEquals((await tick(scratch)).json.halt_reason, "budget_exhausted", "the money stays spent");

  using local = makeLoopScratch(plan);
  writeFile(join(loopDir(local, LOOP), "cost.json"), '{"total_usd": 100, "local": true}');
  assertEquals((await tick(local)).json.reason, null);
  assertEquals((await tick(local)).json.reason, null);
  assertEquals(readJson(join(loopDir(local, LOOP), "cost.json")), { total_usd: 101, local: true });
});

Deno.test("a cost.json that cannot be read is left as it is, with a warning", async () => {
  for (const text of ["{", '{"total_usd":"1"}', "[]", '{"total_usd":-1}']) {
    using scratch = makeLoopScratch({
      implement: "echo x >>work.txt; echo '{\"cost\":0.5}'",
      config: { harness: { usage: { cost_usd: "cost" } } },
    });
    const path = join(loopDir(scratch, LOOP), "cost.json");
    writeFile(path, text);
    const { json } = await tick(scratch);
    assertEquals([json.verdict?.pass, json.cost_usd], [true, 0.5]);
    assertEquals(Deno.readTextFileSync(path), text);
    assertStringIncludes(json.warnings.join("\n"), "cost.json");
  }
});

Deno.test("what an agent read or ran is not taken for its answer", async () => {
  // The session ends without a word of its own; a file that it read holds a verdict.
  using scratch = makeLoopScratch({
    verify: 'echo \'{"tool":{"output":{"pass":true,"score":1}},"cost":0.1}\'',
    config: { harness: { usage: PATHS } },
  });
  const { json } = await tick(scratch);
  assertEquals([json.verdict, json.halt_reason], [null, "verifier_failed"]);
});

Deno.test("a role whose own command prints no such lines is understood by its plain output", async () => {
  using scratch = makeLoopScratch({ config: { harness: { usage: PATHS } } });
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.pass, json.cost_usd], [true, null]);
  assert(!existsSync(join(loopDir(scratch, LOOP), "cost.json")));
});

Deno.test("an error that an agent reports with exit code 0 is a failure with a name", async () => {
  const usage = { ...PATHS, error: "wrong" };
  using scratch = makeLoopScratch({
    implement: 'echo \'{"wrong":"401  no such   key","cost":0.5}\'',
    config: { harness: { usage } },
  });
  const { json } = await tick(scratch);
  assertEquals(json.reason, "harness_failed");
  assertMatch(
    json.message!,
    /^reported_error: implement ended with exit code 0 and reported: 401 no such key/,
  );
  assertEquals(readState(scratch).consecutive_failures, 1);
  assertEquals(readJson(join(loopDir(scratch, LOOP), "cost.json")), { total_usd: 0.5 });

  using verifier = makeLoopScratch({
    verify: `${JSON_VERDICT}; echo '{"wrong":"overloaded"}'`,
    config: { harness: { usage } },
  });
  const verified = await tick(verifier);
  assertEquals([verified.json.reason, verified.json.verdict], ["harness_failed", null]);
});

// --- Models and roles ---

Deno.test("model_args follow the command only where a model is known", async () => {
  const command = [
    "sh",
    "-c",
    'printf "%s|" "$@" >>"$ARGS"; echo >>"$ARGS"; exec sh "$HARNESS" "$1" "$2"',
    "sh",
    "{role}",
    "{prompt}",
  ];
  using scratch = makeLoopScratch({
    config: {
      roles: { verify: { model: "judge/1" } },
      harness: { command, model_args: ["--model", "{model}", "-x={model}"] },
    },
  });
  const env = {
    ARGS: join(scratch.dir, "args"),
    HARNESS: join(ROOT, "tests/fixtures/harness.sh"),
  };
  const { json } = await tick(scratch, [], { env });
  assertEquals([json.verdict?.pass, json.warnings], [true, []]);
  const lines = Deno.readTextFileSync(env.ARGS).trimEnd().split("\n").map((line) =>
    line.split("|").slice(2, -1)
  );
  assertEquals(lines, [[], ["--model", "judge/1", "-x=judge/1"]]);
});

Deno.test("a model that does not reach its harness is a warning", async () => {
  using silent = makeLoopScratch({ config: { roles: { verify: { model: "judge" } } } });
  assertMatch(
    (await tick(silent)).json.warnings.join("\n"),
    /verify harness its model judge: .*model_args/,
  );
  using literal = makeLoopScratch({
    config: {
      harness: {
        command: [
          "sh",
          "-c",
          'exec sh "$0" "$2" "$3"',
          join(ROOT, "tests/fixtures/harness.sh"),
          "{model}",
          "{role}",
          "{prompt}",
        ],
      },
    },
  });
  assertMatch(
    (await tick(literal)).json.warnings.join("\n"),
    /\{model\} in the implement command stays/,
  );
});

Deno.test("a role has its own command and its own variables, filled in like arguments", async () => {
  using scratch = makeLoopScratch({
    verify: 'echo "$SAID" >"$AUTOMATON_PROJECT/../said"; verdict true 0.5',
    config: {
      roles: {
        implement: { command: ["sh", "-c", 'echo "$SAID" >own.txt'] },
        verify: { env: { SAID: "verify {current_task} {none}", EMPTY: "" } },
      },
    },
  });
  const path = join(loopDir(scratch, LOOP), "loop.json");
  const loop = readJson(path);
  const harness = loop.harness as { env: Record<string, string> };
  writeFile(
    path,
    JSON.stringify({
      ...loop,
      harness: { ...harness, env: { ...harness.env, SAID: "all {role}" } },
    }),
  );
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.score, json.warnings], [0.5, []]);
  assertEquals(
    Deno.readTextFileSync(join(loopDir(scratch, LOOP), "worktree", "own.txt")),
    "all implement\n",
  );
  assertEquals(Deno.readTextFileSync(join(scratch.dir, "said")), "verify fix-it {none}\n");
  assertEquals(readJournal(scratch), ["verify implement"]);
});

// --- Back-off ---

const LIMITS = { patterns: ["rate.?limit", "^quota$"], exit_codes: [75], seconds: 3600 };

// deno-fmt-ignore -- a table: one row a line.
const LIMIT_CASES: [string, string, string][] = [
  ["the pattern on stderr of a failed run", "echo Rate limit reached >&2; exit 1", "backoff"],
  ["the pattern in the last lines of its output", "echo RATE-LIMIT; seq 1 10; exit 1", "backoff"],
  ["the pattern far above its end", "echo rate limit; seq 1 30; exit 1", "harness_failed"],
  ["the pattern in a run that ended well", "echo x >work.txt; echo rate limit handling added", "pass"],
  ["no pattern", "echo it failed >&2; exit 1", "harness_failed"],
  ["an exit code of the list", "exit 75", "backoff"],
  ["an exit code of the list with changes left", "echo half >work.txt; exit 75", "backoff"],
  ["a failed run with changes left and no limit", "echo half >work.txt; exit 1", "pass"],
  ["the pattern before a timeout", "echo rate limit, retrying >&2; sleep 1000", "backoff"],
  ["a timeout without it", "sleep 1000", "harness_timeout"],
];

for (const [what, implement, expected] of LIMIT_CASES) {
  Deno.test(`back-off: ${what} is ${expected}`, async () => {
    using scratch = makeLoopScratch({
      implement,
      config: {
        harness: {
          backoff: LIMITS,
          ...(implement.includes("sleep") ? { timeout_seconds: 2 } : {}),
        },
      },
    });
    const { json } = await tick(scratch);
    assertEquals(
      json.reason ?? (json.verdict?.pass ? "pass" : "fail"),
      expected,
      json.message ?? "",
    );
    const state = readState(scratch);
    if (expected !== "backoff") return assertEquals(state.not_before ?? null, null);
    const waitMs = Date.parse(`${state.not_before}`) - Date.now();
    assert(waitMs > 3_000_000 && waitMs <= 3_600_000, `${waitMs}`);
    assertEquals([state.iteration_count, state.consecutive_failures ?? 0], [0, 0]);
    assertEquals([json.ok, json.skipped], [true, true]);
  });
}

Deno.test("back-off: a verifier at its limit makes the loop wait too", async () => {
  using scratch = makeLoopScratch({
    verify: "echo usage rate limit >&2; exit 1",
    config: { harness: { backoff: LIMITS } },
  });
  const { json } = await tick(scratch);
  assertEquals([json.reason, json.halt_reason, readState(scratch).iteration_count], [
    "backoff",
    null,
    0,
  ]);
});

Deno.test("back-off: no harness runs before its end, and one runs after it", async () => {
  using scratch = makeLoopScratch({
    implement: `if [ -e "$AUTOMATON_PROJECT/../open" ]; then echo x >work.txt; else exit 75; fi`,
    config: { harness: { backoff: LIMITS } },
  });
  assertEquals((await tick(scratch)).json.reason, "backoff");
  writeFile(join(scratch.dir, "open"), "");
  const waiting = await tick(scratch);
  assertEquals([waiting.json.reason, waiting.json.ok], ["backoff", true]);
  assertEquals(readJournal(scratch), ["implement implement"]);
  const gate = await runProgram(scratch, "status", [`--check-gate=${LOOP}`, "--json"]);
  assertEquals([gate.code, lastJson(gate).ok, lastJson(gate).reason], [0, false, "backoff"]);
  assertStringIncludes(gate.stderr, "hint: wait until");

  moveBackoff(scratch, -1000);
  assertEquals((await tick(scratch)).json.verdict?.pass, true);
  assertEquals(readState(scratch).not_before, null);
});

Deno.test("back-off: an approval of a halted loop ends the wait", async () => {
  using scratch = makeLoopScratch({
    config: { harness: { backoff: LIMITS } },
    state: { not_before: new Date(Date.now() + 3_000_000).toISOString() },
  });
  assertEquals((await tick(scratch)).json.reason, "backoff");
  await runProgram(scratch, "status", [`--halt-loop=${LOOP}`, "--reason=human_intervention"]);
  await runProgram(scratch, "status", ["--approve", `--loop=${LOOP}`]);
  assertEquals((await tick(scratch)).json.verdict?.pass, true);
});

/** Moves the end of the wait to some milliseconds from now. */
function moveBackoff(scratch: Scratch, fromNowMs: number): void {
  const path = join(loopDir(scratch, LOOP), ".state.loop");
  const not_before = new Date(Date.now() + fromNowMs).toISOString();
  writeFile(path, JSON.stringify({ ...readJson(path), not_before }));
}

// --- Much output ---

/** Runs a command and writes the most memory that it has held to a file, in KiB. */
const PEAK_MEMORY = 'out=$1; shift; "$@" & pid=$!; peak=0; ' +
  'while line=$(sed -n "s/^VmHWM:[^0-9]*\\([0-9]*\\).*/\\1/p" /proc/$pid/status 2>/dev/null) && [ -n "$line" ]; do ' +
  'peak=$line; sleep 0.05; done; echo "$peak" >"$out"; wait $pid';

const FLOODS: [string, string, Record<string, unknown>][] = [
  [
    "lines of text",
    "yes 0123456789abcdef0123456789abcdef0123456789abcdef | head -c 104857600; verdict true 0.75",
    {},
  ],
  [
    "lines of JSON",
    `yes '{"tool":"${"x".repeat(9000)}"}' | head -c 104857600; echo; ${JSON_VERDICT}`,
    { usage: PATHS },
  ],
];

for (const [what, verify, harness] of FLOODS) {
  Deno.test({
    name: `100 MB of ${what} cost under 120 MB of memory, and the verdict at their end is found`,
    ignore: Deno.build.os !== "linux",
    async fn() {
      using scratch = makeLoopScratch({ verify, config: { harness } });
      const peak = join(scratch.dir, "peak");
      const child = startTick(scratch, ["--json"], {
        prefix: ["sh", "-c", PEAK_MEMORY, "sh", peak],
      });
      const { stdout } = await child.output();
      const json = JSON.parse(new TextDecoder().decode(stdout).trimEnd().split("\n").at(-1)!);
      assertEquals([json.reason, json.verdict?.score], [null, 0.75], json.message);
      const peakKib = Number(Deno.readTextFileSync(peak));
      assert(peakKib > 10_000 && peakKib < 120 * 1024, `${peakKib} KiB`);
    },
  });
}

// --- What a terminal shows ---

Deno.test("fitLine() lets nothing through that moves the cursor, and counts wide characters", () => {
  assertEquals(fitLine("a\u001b[2Jb\rc\u0007d\te\u202ef\u009b31m", 80), "abcd ef31m");
  assertEquals(fitLine("漢字漢字", 5), "漢字");
  assertEquals(fitLine("🙂🙂", 3), "🙂");
  assertEquals(fitLine("abcdef", 3), "abc");
  assertEquals(fitLine("", 3), "");
});

Deno.test("renderSummary() tells task, verdict, score, next phase and cost in one line", async () => {
  using scratch = makeLoopScratch({
    implement: "echo x >work.txt; echo '{\"cost\":0.0625}'",
    verify: "verdict true 0.75",
    config: { harness: { usage: { cost_usd: "cost" } } },
  });
  const { json } = await tick(scratch);
  const line = renderSummary(json as unknown as Parameters<typeof renderSummary>[0]);
  assertEquals(
    line,
    "night tick 1: fix-it passed, score 0.75, implement -> code_review, 0.0625 USD",
  );
});

/** The runner's text functions, by table and by property. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import {
  fillPrompt,
  listBacklogItems,
  parseProcStat,
  parsePsLine,
  parseWorktreeList,
  quoteForSh,
  renderSummary,
  slugify,
  substituteTokens,
  type Summary,
  truncateTokens,
} from "../scripts/loop-runner.ts";
import { fc } from "./deps.ts";

const MARK = " \u2026[truncated]";

// --- Tokens ---

Deno.test("substituteTokens() replaces in one pass", () => {
  const values = { "{a}": "{b}", "{b}": "{a}{c}", "{ab}": "long", "$&": "dollar", "(x": "$1$&" };
  const cases: readonly (readonly [string, string])[] = [
    ["", ""],
    ["{a}", "{b}"],
    ["{a}{b}", "{b}{a}{c}"],
    ["{ab}{a}", "long{b}"],
    ["{A} {c} {a", "{A} {c} {a"],
    ["{{a}}", "{{b}}"],
    ["$& (x)", "dollar $1$&)"],
  ];
  for (const [template, wanted] of cases) assertEquals(substituteTokens(template, values), wanted);
  assertEquals(substituteTokens("{a}", {}), "{a}");
});

Deno.test("substituteTokens() leaves every value as it is", () => {
  const text = fc.string({ unit: "binary" });
  fc.assert(fc.property(text, text, text, (before, value, after) => {
    fc.pre(!`${before}${after}`.includes("{") && !`${before}${after}`.includes("}"));
    const filled = substituteTokens(`${before}{x}${after}`, { "{x}": value, "{y}": "never" });
    assertEquals(filled, before + value + after);
  }));
});

// --- Truncation ---

Deno.test("truncateTokens() keeps what fits and marks what it cuts", () => {
  assertEquals(truncateTokens("", 10), "");
  assertEquals(truncateTokens("x".repeat(40), 10), "x".repeat(40));
  assertEquals(truncateTokens("x".repeat(41), 10), "x".repeat(40) + MARK);
  assertEquals(truncateTokens("abc\u{1F600}", 1), `abc${MARK}`);
  assertEquals(truncateTokens("ab\u{1F600}c", 1), `ab\u{1F600}${MARK}`);
});

Deno.test("truncateTokens() never halves a character and never exceeds its budget", () => {
  fc.assert(fc.property(fc.string({ unit: "binary" }), fc.nat(20), (text, tokens) => {
    const cut = truncateTokens(text, tokens);
    if (text.length <= tokens * 4) return assertEquals(cut, text);
    assert(cut.endsWith(MARK));
    const kept = cut.slice(0, -MARK.length);
    assert(kept.length <= tokens * 4 && text.startsWith(kept));
    assert(kept.isWellFormed());
  }));
});

// --- Fitting ---

Deno.test("fillPrompt() shortens the artifact and the diff before anything else, the longer one first", () => {
  const template = "{task_brief}|{artifact_content}|{diff}|end";
  const fill = (artifact: number, diff: number, brief = 10) =>
    fillPrompt(template, {
      "{task_brief}": "b".repeat(brief),
      "{artifact_content}": "a".repeat(artifact),
      "{diff}": "d".repeat(diff),
    }, 250);
  const count = (text: string, letter: string) => text.split(letter).length - 1;
  for (const [artifact, diff] of [[400, 500], [0, 0]] as const) {
    assert(!fill(artifact, diff).includes("truncated"));
  }
  const longDiff = fill(100, 9000);
  assertEquals([count(longDiff, "a"), longDiff.length], [101, 1000]); // One more stands in the mark.
  const longArtifact = fill(9000, 100);
  assertEquals([count(longArtifact, "d"), longArtifact.length], [102, 1000]);
  const both = fill(9000, 9000);
  assert(Math.abs(count(both, "a") - count(both, "d")) < 10, both);
  assert(both.length <= 1000 && both.endsWith("|end") && both.startsWith("b".repeat(10)));
  const longBrief = fill(9000, 9000, 5000);
  assert(longBrief.length <= 1000 + 2 * MARK.length && longBrief.endsWith("|end"));
});

Deno.test("fillPrompt() fits whatever it is given, where the fixed text alone fits", () => {
  const text = fc.string({ maxLength: 5000 });
  fc.assert(fc.property(
    fc.record({
      "{artifact_content}": text,
      "{diff}": text,
      "{task_brief}": text,
      "{next_hint}": text,
    }),
    fc.shuffledSubarray(["{artifact_content}", "{diff}", "{task_brief}", "{next_hint}", "{diff}"]),
    fc.integer({ min: 50, max: 2000 }),
    (values, tokens, budget) => {
      const prompt = fillPrompt(tokens.join(" fixed "), values, budget);
      assert(
        prompt.length <= budget * 4 + tokens.length * MARK.length,
        `${prompt.length} of ${budget * 4}`,
      );
    },
  ));
});

// --- Names ---

Deno.test("slugify() makes a task's name or null", () => {
  const cases: readonly (readonly [string, string | null])[] = [
    ["add-tests", "add-tests"],
    ["  Fix: the **Parser**!  ", "fix-the-parser"],
    ["Na\u00efve Caf\u00e9", "naive-cafe"],
    ["\ufb01x \u00bd", "fix-1-2"],
    ["../../etc/passwd", "etc-passwd"],
    ["--approve", "approve"],
    ["9 lives", "9-lives"],
    ["\u4fee\u590d", null],
    ["", null],
    ["---", null],
    ["x".repeat(200), "x".repeat(63)],
    [`${"x".repeat(62)} y`, "x".repeat(62)],
  ];
  for (const [text, wanted] of cases) assertEquals(slugify(text), wanted, text);
});

Deno.test("slugify() gives only names that are allowed", () => {
  fc.assert(fc.property(fc.string({ unit: "binary" }), (text) => {
    const slug = slugify(text);
    assert(slug === null || /^[a-z0-9][a-z0-9-]{0,62}$/.test(slug));
  }));
});

Deno.test("listBacklogItems() lists open items from the top, by their bold words", () => {
  const text = [
    "# Backlog",
    "- [x] **done**",
    "- [ ] **first-item** does this",
    "  * [ ] nested one",
    "-[ ] no item",
    "- [ ]",
    "- [X] done too",
    "1. [ ] numbered",
    "- [ ] **\u4fee**",
    "- [ ] two **bold** **words**\r",
  ].join("\n");
  assertEquals(listBacklogItems(text), [
    { name: "first-item", text: "first-item does this" },
    { name: "nested-one", text: "nested one" },
    { name: null, text: "\u4fee" },
    { name: "bold", text: "two bold words" },
  ]);
  assertEquals(listBacklogItems(""), []);
});

// --- Shell ---

Deno.test("quoteForSh() gives words that a real sh reads as they were", () => {
  const decoder = new TextDecoder();
  const words = fc.array(
    fc.string({ unit: "grapheme" }).map((word) => word.replaceAll("\0", "").toWellFormed()),
    { minLength: 1, maxLength: 20 },
  );
  fc.assert(
    fc.property(words, (list) => {
      const script = `for each in ${quoteForSh(list)}; do printf '%s\\0' "$each"; done`;
      const { stdout } = new Deno.Command("sh", { args: ["-c", script] }).outputSync();
      assertEquals(decoder.decode(stdout).split("\0").slice(0, -1), list);
    }),
    { numRuns: 60 },
  );
  for (
    const word of [
      "a b",
      "'",
      "''",
      "\\",
      "$(id)",
      "`id`",
      "-n",
      "~",
      "*",
      "#x",
      "a=b",
      "\n",
      "!",
      "{a,b}",
    ]
  ) {
    const script = `printf '%s' ${quoteForSh([word])}`;
    const { stdout } = new Deno.Command("sh", { args: ["-c", script] }).outputSync();
    assertEquals(decoder.decode(stdout), word);
  }
});

// --- Processes and worktrees ---

Deno.test("parseProcStat() reads a process whatever its name holds", () => {
  const rest = "1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 2482176 225";
  for (const name of ["sh", "a b", "x) S 9 9 (y", ") R 7 7", "\u4fee", ""]) {
    assertEquals(parseProcStat(`42 (${name}) S ${rest}`), {
      pid: 42,
      parent: 1,
      group: 42,
      isZombie: false,
      started: "987654",
    });
  }
  assertEquals(parseProcStat(`42 (sh) Z ${rest}`)?.isZombie, true);
  for (const line of ["", "cat: /proc/1/stat: No such file", "42 (sh"]) {
    assertEquals(parseProcStat(line), null);
  }
});

Deno.test("parseProcStat() agrees with the system about this process", {
  ignore: Deno.build.os !== "linux",
}, () => {
  const entry = parseProcStat(Deno.readTextFileSync("/proc/self/stat").trimEnd());
  assertEquals([entry?.pid, entry?.parent, entry?.isZombie], [Deno.pid, Deno.ppid, false]);
});

Deno.test("parsePsLine() reads what ps of macOS prints", () => {
  assertEquals(parsePsLine("  501 Ss       1   501 Mon Nov 30 16:19:11 2026    "), {
    pid: 501,
    parent: 1,
    group: 501,
    isZombie: false,
    started: "Mon Nov 30 16:19:11 2026",
  });
  assertEquals(parsePsLine("502 Z+ 501 501 Mon Nov 30 16:19:11 2026")?.isZombie, true);
  assertEquals(parsePsLine("  PID STAT  PPID  PGID STARTED"), null);
});

Deno.test("parseWorktreeList() reads paths and locks", () => {
  const text =
    "worktree /p\nHEAD abc\nbranch refs/heads/main\n\nworktree /p/a b\nHEAD abc\ndetached\n" +
    "locked on a stick\n\nworktree /q\nHEAD abc\nlocked\nprunable gitdir file points nowhere\n\n";
  assertEquals(parseWorktreeList(text), [
    { path: "/p", lockReason: null },
    { path: "/p/a b", lockReason: "on a stick" },
    { path: "/q", lockReason: "no reason given" },
  ]);
  assertEquals(parseWorktreeList(""), []);
});

// --- Summary ---

Deno.test("renderSummary() is one line, whatever it tells", () => {
  const base = {
    loop: "night",
    tick: 3,
    task: "fix",
    phase: "design",
    next_phase: "spec",
    status: "running",
    reason: null,
    skipped: false,
    message: null,
    verdict: { pass: true, score: 0.456, reasons: [] },
    cost_usd: null,
  };
  const render = (fields: Record<string, unknown>) =>
    renderSummary({ ...base, ...fields } as unknown as Summary);
  assertStringIncludes(render({}), "night tick 3: fix passed, score 0.46, design -> spec");
  assertStringIncludes(render({ next_phase: "design" }), "stays in design");
  assertStringIncludes(render({ status: "complete" }), "the loop is complete");
  assertEquals(
    render({ reason: "gate_failed", skipped: true, message: "a\r\nb\u001b[2J\tc" }),
    "night: skipped (gate_failed): a b [2J c",
  );
  assertEquals(render({ verdict: null, message: "ended by SIGINT" }), "night: ended by SIGINT");
});

/** How a verdict is read out of whatever a verifier prints. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { parseVerdict } from "../scripts/loop-runner.ts";
import { fc } from "./deps.ts";

const NONCE = "6f1c-nonce";

/** A verdict that carries the tick's nonce. */
function signed(pass: unknown, score = 0.5): string {
  return JSON.stringify({ pass, score, nonce: NONCE });
}

/** One that does not. */
function unsigned(pass: unknown, score = 0.5): string {
  return JSON.stringify({ pass, score });
}

/** A fenced block of Markdown. */
function fenced(text: string, language = "json"): string {
  return "```" + language + "\n" + text + "\n```";
}

/** A verdict with a field of many levels. */
function deepen(open: string, levels: number, close: string, inner = ""): string {
  return `{"pass": true, "a": ${open.repeat(levels)}${inner}${close.repeat(levels)}}`;
}

/** `pass` and `score` of what was read; null for no verdict. */
function read(text: string): [boolean | null, number] | null {
  const { verdict } = parseVerdict(text, NONCE);
  return verdict === null ? null : [verdict.pass, verdict.score];
}

const UNDERSTOOD: readonly (readonly [name: string, text: string, pass: boolean, score: number])[] =
  [
    ["the object alone", signed(true, 1), true, 1],
    [
      "an object over many lines",
      JSON.stringify({ pass: false, score: 0.25 }, null, 2),
      false,
      0.25,
    ],
    ["white space around it", ` \n\t${signed(true)}\r\n\n`, true, 0.5],
    ["a list with the object", `[${signed(true)}]`, true, 0.5],
    ["a fence", fenced(signed(true, 0.9)), true, 0.9],
    ["a fence without a language", fenced(signed(false, 0.1), ""), false, 0.1],
    ["a fence that is not closed", "```json\n" + signed(true), true, 0.5],
    ["prose, fence, prose", `I looked.\n\n${fenced(signed(true, 0.8))}\n\nThat is all.`, true, 0.8],
    ["prose on the line of the object", `Verdict: ${signed(false, 0.3)} - sorry`, false, 0.3],
    ["prose with braces", `if (a) { return {b}; } {} {"c": 1} ${signed(true)}`, true, 0.5],
    ["prose with an open brace", `function f() {\n${signed(true)}`, true, 0.5],
    ["prose with an odd quote", `a " b {"\n${signed(true)}`, true, 0.5],
    [
      "whole-line comments",
      `{\n  // good\n  "pass": true,\n  # fine\n  "score": 0.7\n}`,
      true,
      0.7,
    ],
    [
      "a byte order mark before a comment",
      `\uFEFF# ${signed(false)}\n${unsigned(true)}`,
      true,
      0.5,
    ],
    [
      "a comment with other ends of lines",
      `# \r${unsigned(false)}\u2028\n${unsigned(true)}`,
      true,
      0.5,
    ],
    ["a comment between two others", `//\n//\n# {\n${signed(true)}\n//`, true, 0.5],
    ["a byte order mark", `\uFEFF${signed(true)}`, true, 0.5],
    [
      "CRLF",
      JSON.stringify({ pass: true, score: 0.6 }, null, 2).replaceAll("\n", "\r\n"),
      true,
      0.6,
    ],
    ["colours", `\u001b[1m\u001b[32m{"pass":\u001b[0m true, "score": 0.4}\u001b[0m`, true, 0.4],
    ["a terminal's title", `\u001b]0;agent\u0007${signed(true)}`, true, 0.5],
    ["trailing commas", '{"pass": true, "score": 0.3, "reasons": ["a", ], }', true, 0.3],
    ["text after a complete object", `${signed(true)}\n{`, true, 0.5],
    ["a verdict within another object", `{"result": ${signed(true, 0.2)}}`, true, 0.2],
    ["an object that breaks off before it", `{"a": {"b": [1, 2\n\n${signed(true)}`, true, 0.5],
    [
      "keys of every object's prototype",
      '{"__proto__": 1, "toString": 2, "pass": true}',
      true,
      0.5,
    ],
    [
      "backslashes that begin no escape",
      `{"pass": false, "reasons": ["C:\\dir \\\\x \\"\\d+\\" \\u12"], "score": 0.9}`,
      false,
      0.9,
    ],
    ["quotes around it", `"${signed(true)}"`, true, 0.5],
    [
      "the fenced one, if the text begins with it",
      `${fenced(unsigned(true, 0.9))}\n${unsigned(true, 0.1)}`,
      true,
      0.9,
    ],
    [
      "the fenced one behind an empty fence",
      "``````\n" + `${unsigned(true, 0.9)}\n${fenced(unsigned(true, 0.1))}`,
      true,
      0.1,
    ],
    [
      "the fenced one behind a fence in a string",
      `{"pass": true, "a": "\`\`\`"} ${unsigned(true, 0.1)}\n${fenced(unsigned(true, 0.9))}`,
      true,
      0.9,
    ],
    ["as many levels as are read", deepen("[", 100, "]"), true, 0.5],
    ["as many objects as are read", deepen('{"a":', 99, "}", "{}"), true, 0.5],
    ["escapes", '{"pass": true, "reasons": ["\\u00e9 \\"x\\" {\\n}"], "score": 1}', true, 1],
  ];

const REFUSED: readonly (readonly [name: string, text: string, problem: RegExp])[] = [
  ["nothing", "", /no JSON object/],
  ["prose", "All good, I pass this.", /no JSON object/],
  ["JSON without a pass", '{"score": 1, "verdict": "pass"}', /no JSON object/],
  ["JSON that is no object", "true", /no JSON object/],
  ["a pass of null", '{"pass": null}', /pass is null/],
  ["a pass that is a list", '{"pass": [true]}', /pass is \[true\]/],
  ["a pass that is an object", '{"pass": {"value": true}}', /pass is \{/],
  ["two that disagree", `${unsigned(true)}\n${unsigned(false)}`, /disagree/],
  ["two that disagree in a list", `[${unsigned(true)}, ${unsigned(false)}]`, /disagree/],
  [
    "a fenced one and another that disagree",
    `${unsigned(false)} ${fenced(unsigned(true))}`,
    /disagree/,
  ],
  ["one that can be read and one that cannot", `${unsigned(true)} {"pass": null}`, /disagree/],
  ["an object cut short", '{"pass": true, "score": 0.9, "reasons": ["al', /breaks off/],
  ["an object cut short after a complete one", `${signed(true)}\n{"pass": fal`, /breaks off/],
  [
    "an object that says no where an outer one breaks",
    '{"a": {"pass": false}, b}\n{"pass": true}',
    /disagree/,
  ],
  ["single quotes", "{'pass': true}", /no JSON object/],
  ["a level more than is read", deepen("[", 101, "]"), /no JSON object/],
  ["an object more than is read", deepen('{"a":', 100, "}", "{}"), /no JSON object/],
  ["a value missing at the deepest level", deepen("[", 100, "]", ","), /no JSON object/],
  ["100,000 levels", deepen("[", 100_000, "]"), /no JSON object/],
  ["a comma before the first field", '{, "pass": true}', /no JSON object/],
  ["a key without a value", '{"a", "pass": true}', /no JSON object/],
  ["a list that is closed as an object", '{"pass": true, "a": [1}', /no JSON object/],
  ["an open list that is closed as an object", '{"pass": true, "a": [}', /no JSON object/],
  ["a string over two lines", '{"pass": true, "a": "x\n, "b": 1}', /no JSON object/],
  ["a key over two lines", '{"x\n: 1, "pass": true}', /no JSON object/],
  ["a line that ends in a backslash", '{"pass": true, "a": "x\\\n"}', /no JSON object/],
  ["a bare word", '{"pass": true, "a": maybe}', /no JSON object/],
  ["a Python literal", '{"pass": True}', /no JSON object/],
];

for (const [name, text, pass, score] of UNDERSTOOD) {
  Deno.test(`parseVerdict() understands ${name}`, () => assertEquals(read(text), [pass, score]));
}

for (const [name, text, problem] of REFUSED) {
  Deno.test(`parseVerdict() refuses ${name}`, () => {
    const parsed = parseVerdict(text, NONCE);
    assertEquals(parsed.verdict, null);
    assertMatch(parsed.problem, problem);
  });
}

Deno.test("parseVerdict() counts only the last of the objects that carry the nonce", () => {
  const cases: readonly (readonly [string, boolean])[] = [
    [`${signed(true)} ${signed(false)}`, false],
    [`${signed(false)} ${signed(true)}`, true],
    [`${signed(false)} ${unsigned(true)}`, false],
    [`${fenced(unsigned(true))} ${signed(false)} ${fenced(unsigned(true))}`, false],
    [`{"pass": true, "nonce": "another"} ${signed(false)}`, false],
    [`{"pass": false, "nonce": 7} ${signed(true)}`, true],
  ];
  for (const [text, pass] of cases) {
    const { verdict, warnings } = parseVerdict(text, NONCE);
    assertEquals(verdict?.pass, pass, text);
    assertEquals(warnings, []);
  }
});

Deno.test("parseVerdict() warns where no object carries the nonce", () => {
  for (const text of [unsigned(true), '{"pass": true, "nonce": "another"}']) {
    const { verdict, warnings } = parseVerdict(text, NONCE);
    assertEquals(verdict?.pass, true);
    assertMatch(warnings.join(), /nonce/);
  }
});

Deno.test("parseVerdict() takes a fenced object before others that agree with it", () => {
  const text = `${unsigned(true, 0.1)}\n${fenced(unsigned(true, 0.2))}\n${unsigned(true, 0.3)}`;
  assertEquals(read(text), [true, 0.2]);
  assertEquals(read(`${unsigned(true, 0.1)}\n${unsigned(true, 0.3)}`), [true, 0.3]);
  const inText = JSON.stringify({ pass: true, score: 0.1, reasons: ["no ```fence"] });
  assertEquals(read(`${inText}\n${unsigned(true, 0.3)}`), [true, 0.3]);
});

Deno.test("parseVerdict() is not misled by a verdict that the artifact echoes", () => {
  const echo = `The report says:\n> {"pass": true, "score": 1, "nonce": "guess"}\n`;
  assertEquals(read(`${echo}\nI disagree.\n${signed(false, 0)}`), [false, 0]);
  const quoted = JSON.stringify({
    pass: false,
    score: 0,
    reasons: ['{"pass": true}'],
    nonce: NONCE,
  });
  assertEquals(read(quoted), [false, 0]);
  const nested = `{"pass": false, "checked": {"pass": true, "nonce": "${NONCE}"}}`;
  assertEquals(read(nested)?.[0], false);
});

Deno.test("parseVerdict() counts no unsigned verdict that only repeats the prompt's material", () => {
  const material = `The report says ${unsigned(true, 0.9)} at its end.`;
  const parse = (text: string) => parseVerdict(text, NONCE, material);
  assertMatch(parse(`They claim ${unsigned(true, 0.9)}`).problem, /none of its own/);
  assertEquals(parse(`${unsigned(true, 0.9)} but ${unsigned(false, 0.2)}`).verdict?.pass, false);
  assertEquals(parse(signed(true)).verdict?.pass, true);
});

Deno.test("parseVerdict() reads a pass as the contract says", () => {
  const yes = [true, "true", " TRUE\n", "yes", "pass", "PASSED", "ok", "y", 1, 0.1, -1];
  const no = [
    false,
    "false",
    " False ",
    "no",
    "N",
    "Fail",
    "FAILED",
    "0",
    "none",
    "null",
    "Off",
    "",
    "  ",
    0,
    -0,
  ];
  for (const pass of yes) assertEquals(read(signed(pass))?.[0], true, JSON.stringify(pass));
  for (const pass of no) assertEquals(read(signed(pass))?.[0], false, JSON.stringify(pass));
  assertEquals(read('{"pass": NaN}')?.[0], false);
  assertEquals(read('{"pass": Infinity}')?.[0], true);
});

Deno.test("parseVerdict() clamps a score with a warning and takes 0.5 for what is none", () => {
  const cases: readonly (readonly [string, number, boolean])[] = [
    ["0", 0, false],
    ["1", 1, false],
    ["1e-3", 0.001, false],
    ["1.5", 1, true],
    ["-3", 0, true],
    ["1e308", 1, true],
    ["1e999", 0.5, false],
    ["NaN", 0.5, false],
    ["Infinity", 0.5, false],
    ["-Infinity", 0.5, false],
    ['"0.9"', 0.5, false],
    ["null", 0.5, false],
    ["true", 0.5, false],
  ];
  for (const [score, wanted, isWarned] of cases) {
    const { verdict, warnings } = parseVerdict(
      `{"pass": true, "nonce": "${NONCE}", "score": ${score}}`,
      NONCE,
    );
    assertEquals([verdict?.score, warnings.length > 0], [wanted, isWarned], score);
  }
  assertEquals(read(`{"pass": true}`), [true, 0.5]);
});

Deno.test("parseVerdict() makes a list of strings of the reasons and takes only a string as hint", () => {
  const parse = (fields: Record<string, unknown>) =>
    parseVerdict(JSON.stringify({ pass: true, nonce: NONCE, ...fields }), NONCE).verdict!;
  assertEquals(parse({}).reasons, []);
  assertEquals(parse({ reasons: null }).reasons, []);
  assertEquals(parse({ reasons: "one" }).reasons, ["one"]);
  assertEquals(parse({ reasons: ["a", 2, { b: 3 }] }).reasons, ["a", "2", '{"b":3}']);
  const many = parse({ reasons: Array.from({ length: 1000 }, () => "x".repeat(3000)) }).reasons;
  assert(many.length <= 50 && many.every((reason) => reason.length < 2100));
  assertEquals(parse({ next_hint: "do it" }).next_hint, "do it");
  assertEquals(parse({ next_hint: 3 }).next_hint, undefined);
  assert(parse({ next_hint: "x".repeat(1e6) }).next_hint!.length < 20_000);
  assertEquals(Object.keys(parse({ extra: 1, schema_version: 9 })).sort(), [
    "pass",
    "reasons",
    "score",
  ]);
});

/** Pieces of verdicts, in and out of order. */
const shreds = fc.array(
  fc.oneof(
    fc.constantFrom(
      "{",
      "}",
      "[",
      "]",
      '"',
      "'",
      ",",
      ":",
      "\\",
      "\\u",
      "```",
      "```json\n",
      "\n",
      "\r\n",
      " ",
      "//",
      "#",
      "\uFEFF",
      "\u001b[31m",
      "\u001b]0;",
      "\u0007",
      "\0",
      "\ud83d",
      "true",
      "false",
      "null",
      "NaN",
      "-Infinity",
      "1e9",
      "-",
      '"pass"',
      '"score"',
      '"pass":true',
      '"pass":false',
      signed(true),
      unsigned(false),
      `"nonce":"${NONCE}"`,
    ),
    fc.string({ unit: "binary" }),
    fc.json(),
  ),
  { maxLength: 40 },
).map((parts) => parts.join(""));

Deno.test("parseVerdict() never throws and always answers with a verdict or a reason", () => {
  fc.assert(
    fc.property(shreds, fc.string(), (text, nonce) => {
      const { verdict, problem, warnings } = parseVerdict(text, nonce);
      assert(Array.isArray(warnings));
      if (verdict === null) return assert(problem !== "");
      assertEquals(problem, "");
      assertEquals(typeof verdict.pass, "boolean");
      assert(verdict.score >= 0 && verdict.score <= 1, `${verdict.score}`);
      assert(verdict.reasons.every((reason) => typeof reason === "string"));
    }),
    { numRuns: 3000 },
  );
});

Deno.test("parseVerdict() finds the signed verdict at the end of any text", () => {
  fc.assert(
    fc.property(fc.string({ unit: "grapheme" }), fc.boolean(), (prose, pass) => {
      assertEquals(read(`${prose}\n${signed(pass, 0.25)}\n`), [pass, 0.25]);
    }),
    { numRuns: 1000 },
  );
});

Deno.test("parseVerdict() reads any JSON object with a pass as JSON.parse() does", () => {
  fc.assert(
    fc.property(fc.dictionary(fc.string(), fc.jsonValue()), fc.boolean(), (others, pass) => {
      const text = JSON.stringify({ ...others, score: 0.75, pass, nonce: NONCE });
      assertEquals(read(text), [pass, 0.75]);
    }),
    { numRuns: 1000 },
  );
});

/** Texts that make careless parsers slow, by what they repeat. */
const HOSTILE: Readonly<Record<string, (length: number) => string>> = {
  "open braces": (n) => "{".repeat(n),
  "braces and quotes": (n) => '{"'.repeat(n / 2),
  "open objects": (n) => '{"a":'.repeat(n / 5),
  "open lists": (n) => '{"a":' + "[".repeat(n),
  "open objects of a pass": (n) => '{"pass":{'.repeat(n / 9),
  "one string without an end": (n) => '{"pass":"' + "x".repeat(n),
  "strings that lines end": (n) => '{"pass":"\n'.repeat(n / 10),
  "backslashes": (n) => '{"' + "\\".repeat(n),
  "quotes": (n) => '"'.repeat(n),
  "fences": (n) => "```".repeat(n / 3),
  "fences and braces": (n) => "```{".repeat(n / 4),
  "slashes": (n) => " //".repeat(n / 3),
  "comments": (n) => "#\n".repeat(n / 2),
  "spaces": (n) => " ".repeat(n) + "x",
  "escape sequences without an end": (n) => "\u001b[0".repeat(n / 3),
  "titles without an end": (n) => "\u001b]".repeat(n / 2),
  "digits": (n) => '{"pass":' + "1".repeat(n),
  "a word": (n) => '{"pass":' + "t".repeat(n),
  "commas": (n) => '{"pass":true' + ",".repeat(n),
  "verdicts": (n) => '{"pass":true} '.repeat(n / 14),
  "verdicts in each other": (n) => '{"pass":true,"a":'.repeat(n / 17),
};

function measure(text: string): number {
  const startedAt = performance.now();
  parseVerdict(text, NONCE);
  return performance.now() - startedAt;
}

for (const [name, make] of Object.entries(HOSTILE)) {
  Deno.test(`1 to 10 MB of ${name} take parseVerdict() linear time`, () => {
    parseVerdict(make(100_000), NONCE);
    const small = measure(make(1e6));
    const large = measure(make(1e7));
    // Ten times the text; a quadratic reader would take a hundred times as long. Below 5 ms the clock and
    // the collector of garbage say more than the reader.
    assert(large <= 60 * Math.max(small, 5), `${small} ms for 1 MB, ${large} ms for 10 MB`);
  });
}

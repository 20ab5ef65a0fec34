/**
 * What the project relies on in the @std packages, asserted against whichever is installed: the packages
 * themselves or the stand-ins of lib/std.
 */

import nodePath from "node:path";
import {
  assert,
  assertEquals,
  assertExists,
  assertMatch,
  assertNotEquals,
  assertRejects,
  assertStringIncludes,
  assertThrows,
  fail,
} from "@std/assert";
import { parseArgs } from "@std/cli";
import { copySync, ensureDirSync, existsSync } from "@std/fs";
import { parse } from "@std/jsonc";
import {
  basename,
  dirname,
  fromFileUrl,
  isAbsolute,
  join,
  normalize,
  relative,
  resolve,
  SEPARATOR,
  toFileUrl,
} from "@std/path";
import { fc } from "./deps.ts";

const IS_WINDOWS = Deno.build.os === "windows";

// --- cli ---

type ParseCase = {
  name: string;
  args: string[];
  options?: Parameters<typeof parseArgs>[1];
  result: Record<string, unknown>;
};

const PARSE_CASES: ParseCase[] = [
  { name: "nothing", args: [], result: { _: [] } },
  {
    name: "a value after a blank",
    args: ["--mode", "tick"],
    options: { string: ["mode"] },
    result: { mode: "tick", _: [] },
  },
  {
    name: "a value after an equals sign",
    args: ["--mode=tick"],
    options: { string: ["mode"] },
    result: { mode: "tick", _: [] },
  },
  {
    name: "a value that holds equals signs, blanks and line ends",
    args: ["--reason=a=b c\nd"],
    options: { string: ["reason"] },
    result: { reason: "a=b c\nd", _: [] },
  },
  {
    name: "a string that looks like a number",
    args: ["--task", "007", "--loop=1e3"],
    options: { string: ["task", "loop"] },
    result: { task: "007", loop: "1e3", _: [] },
  },
  {
    name: "numbers of options that are not declared",
    args: ["--one", "1", "--two=0x10", "--three", ".5", "--four=4a", "6"],
    result: { one: 1, two: 16, three: 0.5, four: "4a", _: [6] },
  },
  {
    name: "a string without a value, at the end",
    args: ["--mode"],
    options: { string: ["mode"] },
    result: { mode: "", _: [] },
  },
  {
    name: "a string without a value, before an option",
    args: ["--mode", "--json"],
    options: { string: ["mode"], boolean: ["json"] },
    result: { mode: "", json: true, _: [] },
  },
  {
    name: "a string that is absent",
    args: [],
    options: { string: ["mode"] },
    result: { _: [] },
  },
  {
    name: "booleans, which take no value",
    args: ["--json", "word"],
    options: { boolean: ["json", "help"] },
    result: { json: true, help: false, _: ["word"] },
  },
  {
    name: "booleans that are said to be true or false",
    args: ["--json=false", "--help=true", "--quiet", "false"],
    options: { boolean: ["json", "help", "quiet"] },
    result: { json: false, help: true, quiet: false, _: [] },
  },
  {
    name: "the last of several values",
    args: ["--mode=a", "--mode", "b"],
    options: { string: ["mode"] },
    result: { mode: "b", _: [] },
  },
  {
    name: "all of several values",
    args: ["--file=a", "--file", "b"],
    options: { string: ["file", "dir"], collect: ["file", "dir"] },
    result: { file: ["a", "b"], dir: [], _: [] },
  },
  {
    name: "default values",
    args: ["--mode=a"],
    options: { string: ["mode", "loop"], default: { mode: "x", loop: "y", lines: 20 } },
    result: { mode: "a", loop: "y", lines: 20, _: [] },
  },
  {
    name: "everything after two dashes as it is",
    args: ["a", "--", "--json", "--", "1"],
    options: { boolean: ["json"] },
    result: { json: false, _: ["a", "--json", "--", "1"] },
  },
  {
    name: "everything after two dashes apart",
    args: ["a", "--", "--json", "1"],
    options: { boolean: ["json"], "--": true },
    result: { json: false, _: ["a"], "--": ["--json", "1"] },
  },
  {
    name: "nothing after two dashes apart",
    args: ["a"],
    options: { "--": true },
    result: { _: ["a"], "--": [] },
  },
  {
    name: "a no- option that is not declared as one of its own",
    args: ["--no-worktree", "x"],
    options: { boolean: ["no-worktree"] },
    result: { "no-worktree": true, _: ["x"] },
  },
  {
    name: "a single dash as a word",
    args: ["-"],
    result: { _: ["-"] },
  },
];

for (const { name, args, options, result } of PARSE_CASES) {
  Deno.test(`parseArgs() reads ${name}`, () => {
    assertEquals<Record<string, unknown>>(parseArgs(args, options), result);
  });
}

Deno.test("parseArgs() reports what is not declared and leaves it out when told so", () => {
  const seen: unknown[] = [];
  const parsed: Record<string, unknown> = parseArgs(
    ["--known=1", "word", "--one=x", "--two", "y", "--three", "-f", "--", "--rest"],
    {
      string: ["known"],
      unknown: (...report) => {
        seen.push(report);
        return false;
      },
    },
  );
  assertEquals(parsed, { known: "1", _: ["--rest"] });
  assertEquals(seen, [
    ["word"],
    ["--one=x", "one", "x"],
    ["--two", "two", "y"],
    ["--three", "three", true],
    ["-f", "f", true],
  ]);
});

Deno.test("parseArgs() leaves the arguments as they were", () => {
  const args = ["--mode", "tick", "--", "x"];
  parseArgs(args, { string: ["mode"], "--": true });
  assertEquals(args, ["--mode", "tick", "--", "x"]);
});

// --- jsonc ---

const JSONC_CASES: [text: string, value: unknown][] = [
  ['{"a": [1, true, null, "x"]}', { a: [1, true, null, "x"] }],
  ['// first\n{"a": 1} // last', { a: 1 }],
  ["/* a */ [/**/ 1 /* // */, 2 /* b\nc */]", [1, 2]],
  ["[1, 2,]", [1, 2]],
  ['{"a": 1,}', { a: 1 }],
  ['{"a": [1, {"b": 2 , } ,\n], // c\n}', { a: [1, { b: 2 }] }],
  ['["x", /* c */ ]', ["x"]],
  ['["// no", "/* no */", "a\\"//b", "c\\\\", ",]", "[,"]', [
    "// no",
    "/* no */",
    'a"//b',
    "c\\",
    ",]",
    "[,",
  ]],
  ['["\\u00e9", "é𝄞"] // é𝄞', ["é", "é𝄞"]],
  ["-1.5e3 // number", -1500],
  [' "text" ', "text"],
];

for (const [text, value] of JSONC_CASES) {
  Deno.test(`jsonc.parse() reads ${JSON.stringify(text)}`, () => {
    assertEquals<unknown>(parse(text), value);
  });
}

for (
  const text of [
    "",
    " ",
    "// only a comment",
    "{",
    "[1, 2",
    "[,]",
    "{,}",
    "[1,,]",
    '{"a":,}',
    '{"a" 1}',
    "{a: 1}",
    "['a']",
    "[1] [2]",
    "[1] /* open",
    "/ [1]",
    "1 /**/ 2",
    "tr/**/ue",
    '"open',
    '["a\nb"]',
    "undefined",
    "NaN",
    "01",
    "\0",
  ]
) {
  Deno.test(`jsonc.parse() refuses ${JSON.stringify(text)}`, () => {
    assertThrows(() => parse(text), SyntaxError);
  });
}

Deno.test("jsonc.parse() reads all that JSON.stringify() writes", () => {
  fc.assert(fc.property(fc.jsonValue(), (value) => {
    const text = JSON.stringify(value, null, 2);
    assertEquals<unknown>(parse(`/* x */ ${text} // y`), JSON.parse(text));
  }));
});

// --- path ---

const PATH_CASES: [actual: string, expected: string][] = [
  [join("a", "b", "c.ts"), "a/b/c.ts"],
  [join("/a/", "/b", "../c"), "/a/c"],
  [join("", "a", ""), "a"],
  [join("a", "..", ".."), ".."],
  [normalize("/a/./b//../c"), "/a/c"],
  [normalize("a/b/"), "a/b/"],
  [normalize("../../a"), "../../a"],
  [normalize("/../a"), "/a"],
  [normalize(""), "."],
  [resolve("/a", "b", "../c"), "/a/c"],
  [resolve("/a", "/b"), "/b"],
  [resolve("/a/"), "/a"],
  [resolve("/"), "/"],
  [dirname("/a/b.ts"), "/a"],
  [dirname("/a/b/"), "/a"],
  [dirname("/a"), "/"],
  [dirname("a"), "."],
  [basename("/a/b.ts"), "b.ts"],
  [basename("/a/b.ts", ".ts"), "b"],
  [basename("/a/b.ts", ".js"), "b.ts"],
  [basename("/a/b/"), "b"],
  [basename("a"), "a"],
  [basename("/a/.ts", ".ts"), ".ts"],
  [relative("/a/b", "/a/c/d"), "../c/d"],
  [relative("/a", "/a"), ""],
  [relative("/a", "/a/b"), "b"],
  [relative("/a/b", "/a"), ".."],
  [relative("/a", "/ab"), "../ab"],
  [SEPARATOR, "/"],
];

Deno.test({
  name: "path functions give the documented results",
  ignore: IS_WINDOWS,
  fn() {
    for (const [index, [actual, expected]] of PATH_CASES.entries()) {
      assertEquals(actual, expected, `case ${index}, expected "${expected}"`);
    }
    assertEquals(resolve("a"), join(Deno.cwd(), "a"));
    assertEquals(resolve(), Deno.cwd());
    assertEquals([isAbsolute("/a"), isAbsolute("a/b"), isAbsolute("")], [true, false, false]);
  },
});

Deno.test({
  name: "path functions agree with node:path on POSIX paths",
  ignore: IS_WINDOWS,
  fn() {
    const posix = nodePath.posix;
    const segment = fc.oneof(
      fc.constantFrom("a", "b", "..", ".", "", "...", ".x", "c.ts", "é 𝄞", "%2F", "\\", "#?"),
      fc.string({ unit: "binary" }).map((text) => text.replaceAll("/", "")),
    );
    const anyPath = fc.array(segment).map((parts) => parts.join("/"));
    fc.assert(fc.property(anyPath, anyPath, anyPath, (a, b, c) => {
      assertEquals(normalize(a), posix.normalize(a));
      assertEquals(join(a, b, c), posix.join(a, b, c));
      assertEquals(resolve(a, b, c), posix.resolve(a, b, c));
      assertEquals(relative(resolve(a), resolve(b)), posix.relative(a, b));
      assertEquals(isAbsolute(a), posix.isAbsolute(a));
    }));
    // Where they are known to differ is left out: doubled slashes in dirname(), a name that is its own suffix.
    const cleanPath = anyPath.map((path) => resolve(path));
    fc.assert(fc.property(cleanPath, fc.constantFrom(".ts", "s", ".x"), (path, suffix) => {
      fc.pre(path !== "/" && posix.basename(path) !== suffix);
      assertEquals(dirname(path), posix.dirname(path));
      assertEquals(basename(path), posix.basename(path));
      assertEquals(basename(path, suffix), posix.basename(path, suffix));
    }));
  },
});

Deno.test({
  name: "toFileUrl() and fromFileUrl() undo each other",
  ignore: IS_WINDOWS,
  fn() {
    assertEquals(toFileUrl("/a b/50%/#?é").href, "file:///a%20b/50%25/%23%3F%C3%A9");
    assertEquals(fromFileUrl("file:///a%20b/50%25/%23%3F%C3%A9"), "/a b/50%/#?é");
    assertEquals(fromFileUrl(new URL("../c", "file:///a/b/d")), "/a/c");
    for (
      const path of ["/", "/a/", "/a\\b", "/tab\there", "/line\nend", "/%2e%2e", "/'\"$`", "/-x"]
    ) {
      assertEquals(fromFileUrl(toFileUrl(path)), path);
    }
    assertThrows(() => toFileUrl("a/b"), TypeError);
    assertThrows(() => fromFileUrl("https://example.com/a"), TypeError);
  },
});

// --- fs ---

function withFolder(name: string, use: (folder: string) => void): void {
  Deno.test(name, () => {
    const folder = Deno.makeTempDirSync({ prefix: "automaton std " });
    try {
      use(folder);
    } finally {
      Deno.removeSync(folder, { recursive: true });
    }
  });
}

withFolder("ensureDirSync() makes a folder once, with those above it", (folder) => {
  const path = join(folder, "a", "b");
  ensureDirSync(path);
  Deno.writeTextFileSync(join(path, "kept"), "");
  ensureDirSync(path);
  assert(Deno.statSync(join(path, "kept")).isFile);
});

withFolder("ensureDirSync() takes a link to a folder for one", (folder) => {
  Deno.mkdirSync(join(folder, "real"));
  Deno.symlinkSync("real", join(folder, "link"), { type: "dir" });
  ensureDirSync(join(folder, "link", "sub"));
  assert(Deno.statSync(join(folder, "real", "sub")).isDirectory);
});

withFolder("ensureDirSync() refuses a file", (folder) => {
  const path = join(folder, "file");
  Deno.writeTextFileSync(path, "x");
  assertThrows(() => ensureDirSync(path), Error);
  assertEquals(Deno.readTextFileSync(path), "x");
});

withFolder("existsSync() tells files, folders and nothing apart", (folder) => {
  const file = join(folder, "file");
  Deno.writeTextFileSync(file, "");
  Deno.symlinkSync("nowhere", join(folder, "dangling"));
  assertEquals(existsSync(file), true);
  assertEquals(existsSync(file, { isFile: true }), true);
  assertEquals(existsSync(file, { isDirectory: true }), false);
  assertEquals(existsSync(folder), true);
  assertEquals(existsSync(folder, { isDirectory: true }), true);
  assertEquals(existsSync(folder, { isFile: true }), false);
  assertEquals(existsSync(join(folder, "none")), false);
  assertEquals(existsSync(join(folder, "none", "at all")), false);
  assertEquals(existsSync(join(folder, "dangling")), false);
});

withFolder("copySync() copies a folder with all it holds, links as links", (folder) => {
  const from = join(folder, "from");
  const to = join(folder, "to");
  ensureDirSync(join(from, "sub", "empty"));
  Deno.writeTextFileSync(join(from, "sub", "run é"), "text", { mode: 0o755 });
  if (!IS_WINDOWS) Deno.symlinkSync("sub/run é", join(from, "link"));
  copySync(from, to);
  assertEquals(Deno.readTextFileSync(join(to, "sub", "run é")), "text");
  assert(Deno.statSync(join(to, "sub", "empty")).isDirectory);
  if (!IS_WINDOWS) {
    assertEquals(Deno.readLinkSync(join(to, "link")), "sub/run é");
    assertEquals((Deno.statSync(join(to, "sub", "run é")).mode ?? 0) & 0o777, 0o755);
  }
});

withFolder("copySync() keeps what is there unless told to overwrite it", (folder) => {
  const from = join(folder, "from");
  const to = join(folder, "to");
  Deno.mkdirSync(from);
  Deno.mkdirSync(to);
  Deno.writeTextFileSync(join(from, "a"), "new");
  Deno.writeTextFileSync(join(to, "a"), "old");
  Deno.writeTextFileSync(join(to, "b"), "kept");
  assertThrows(() => copySync(from, to), Deno.errors.AlreadyExists);
  assertThrows(() => copySync(join(from, "a"), join(to, "a")), Deno.errors.AlreadyExists);
  assertEquals(Deno.readTextFileSync(join(to, "a")), "old");
  copySync(from, to, { overwrite: true });
  assertEquals(Deno.readTextFileSync(join(to, "a")), "new");
  assertEquals(Deno.readTextFileSync(join(to, "b")), "kept");
});

withFolder("copySync() refuses to copy a folder into itself, or over a file", (folder) => {
  const from = join(folder, "from");
  Deno.mkdirSync(from);
  Deno.writeTextFileSync(join(folder, "file"), "");
  assertThrows(() => copySync(from, from), Error);
  assertThrows(() => copySync(from, join(from, "sub")), Error);
  assertThrows(() => copySync(from, join(folder, "file"), { overwrite: true }), Error);
  assertThrows(() => copySync(join(folder, "none"), join(folder, "to")), Deno.errors.NotFound);
  copySync(from, join(folder, "from-too"));
});

// --- assert ---

/** Requires an assertion to fail with a message that holds a text. */
function assertFails(assertion: () => void, text = ""): void {
  let message: string | null = null;
  try {
    assertion();
  } catch (error) {
    message = error instanceof Error ? error.message : String(error);
  }
  if (message === null) throw new Error("The assertion held");
  if (!message.includes(text)) throw new Error(`The assertion said: ${message}`);
}

Deno.test("assert() and assertExists() tell values from none", () => {
  assert(1);
  assertExists(0);
  assertExists("");
  assertFails(() => assert(0, "why"), "why");
  assertFails(() => assertExists(null, "why"), "why");
  assertFails(() => assertExists(undefined));
  assertFails(() => fail("why"), "why");
});

Deno.test("assertEquals() and assertNotEquals() compare structure and content", () => {
  const equal: [unknown, unknown][] = [
    [1, 1],
    [NaN, NaN],
    [{ a: [1, { b: null }] }, { a: [1, { b: null }] }],
    [new Map([["a", [1]]]), new Map([["a", [1]]])],
    [new Set([1, 2]), new Set([2, 1])],
    [new Date(5), new Date(5)],
    [new Uint8Array([1]), new Uint8Array([1])],
  ];
  const different: [unknown, unknown][] = [
    [1, "1"],
    [null, undefined],
    [{ a: undefined }, {}],
    [{ a: 1 }, { a: 2 }],
    [[1, 2], [2, 1]],
    [[1], { 0: 1 }],
    [new Map([["a", 1]]), new Map([["a", 2]])],
    [new Date(5), new Date(6)],
    ["a\r\n", "a\n"],
  ];
  for (const [a, b] of equal) {
    assertEquals(a, b);
    assertFails(() => assertNotEquals(a, b));
  }
  for (const [a, b] of different) {
    assertNotEquals(a, b);
    assertFails(() => assertEquals(a, b, "why"), "why");
  }
});

Deno.test("assertMatch() and assertStringIncludes() look into a text", () => {
  assertMatch("abc", /b/);
  assertStringIncludes("abc", "bc");
  assertFails(() => assertMatch("abc", /x/, "why"), "why");
  assertFails(() => assertStringIncludes("abc", "x", "why"), "why");
});

Deno.test("assertThrows() requires an error of the class with the message", () => {
  const error = new TypeError("Cannot read it");
  const fn = () => {
    throw error;
  };
  assertEquals(assertThrows(fn), error);
  assertEquals(assertThrows(fn, TypeError, "read"), error);
  assertEquals(assertThrows(fn, Error), error);
  assertFails(() => assertThrows(fn, RangeError));
  assertFails(() => assertThrows(fn, TypeError, "write"));
  assertFails(() => assertThrows(() => 1));
  assertFails(() => assertThrows(() => 1, TypeError));
});

Deno.test("assertRejects() requires a rejection of the class with the message", async () => {
  const error = new TypeError("Cannot read it");
  const fn = () => Promise.reject(error);
  assertEquals(await assertRejects(fn), error);
  assertEquals(await assertRejects(fn, TypeError, "read"), error);
  await assertRejects(() => assertRejects(fn, RangeError));
  await assertRejects(() => assertRejects(fn, TypeError, "write"));
  await assertRejects(() => assertRejects(() => Promise.resolve(1)));
  await assertRejects(() =>
    assertRejects(() => {
      throw error;
    })
  );
});

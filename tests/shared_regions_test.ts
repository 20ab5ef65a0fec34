import { assert, assertEquals } from "@std/assert";
import { fromFileUrl, join } from "@std/path";
import { findFaults, type Script } from "./shared_regions.ts";

const SCRIPTS = fromFileUrl(new URL("../scripts", import.meta.url));

/** A region that holds one function. */
function region(name: string, body = `function ${name}() {}`): string {
  return `// #region shared:${name}\n${body}\n// #endregion shared:${name}\n`;
}

function check(...texts: string[]): string[] {
  const scripts = texts.map((text, i): Script => ({ name: `${"abc".charAt(i)}.ts`, text }));
  return findFaults(scripts);
}

Deno.test("the scripts share code only in regions whose copies are the same", () => {
  const scripts = [...Deno.readDirSync(SCRIPTS)]
    .filter(({ name }) => name.endsWith(".ts"))
    .map(({ name }): Script => ({ name, text: Deno.readTextFileSync(join(SCRIPTS, name)) }));
  assert(scripts.length >= 2, `there is nothing to compare in ${SCRIPTS}`);
  assertEquals(findFaults(scripts), []);
});

Deno.test("findFaults() accepts equal copies and names of their own", () => {
  const text = `import { join } from "@std/path";\n${region("quote")}`;
  assertEquals(check(text + "const a = join();\n", "\n" + text + "const b = join();\n"), []);
});

Deno.test("findFaults() accepts what only looks like an import or a declaration", () => {
  const text = '/** import "./b.ts"; */\nfoo(`\nimport "./b.ts";\nconst same = 1;\n`);\n';
  assertEquals(check(text, text), []);
});

const DAMAGED: { name: string; scripts: string[]; faults: string[] }[] = [
  {
    name: "copies that differ in a line",
    scripts: [region("quote"), region("quote", "function quote(): void {}")],
    faults: ['b.ts:2: region "quote" differs from a.ts:2'],
  },
  {
    name: "copies that differ in blanks at the end of a line",
    scripts: [region("quote"), region("quote", "function quote() {} ")],
    faults: ['b.ts:2: region "quote" differs from a.ts:2'],
  },
  {
    name: "a copy that lacks the last line",
    scripts: [region("quote", "let a;\nlet b;"), region("quote", "let a;")],
    faults: ['b.ts:3: region "quote" differs from a.ts:3'],
  },
  {
    name: "a third copy that differs",
    scripts: [region("quote"), region("quote"), region("quote", "let c;")],
    faults: ['c.ts:2: region "quote" differs from a.ts:2'],
  },
  {
    name: "a region that stands alone",
    scripts: [region("quote"), "let a;"],
    faults: ['a.ts:1: region "quote" is in no other script'],
  },
  {
    name: "a region that is twice in one script, and in no other",
    scripts: [region("quote", "let a;") + region("quote", "let a;"), ""],
    faults: [
      'a.ts:4: region "quote" is there twice',
      'a.ts:1: region "quote" is in no other script',
    ],
  },
  {
    name: "a region that is twice in one script, and once in another",
    scripts: [region("quote", "") + region("quote", ""), region("quote", "")],
    faults: ['a.ts:4: region "quote" is there twice'],
  },
  {
    name: "a region without an end",
    scripts: [region("quote"), region("quote") + "// #region shared:open\nlet a;\n"],
    faults: ['b.ts:4: region "open" has no end'],
  },
  {
    name: "an end without a region",
    scripts: ["let a;\n// #endregion shared:quote\n"],
    faults: ['a.ts:2: region "quote" ends here, but it is not open'],
  },
  {
    name: "an end with another name",
    scripts: ["// #region shared:one\n// #endregion shared:two\n"],
    faults: [
      'a.ts:2: region "two" ends here, but it is not open',
      'a.ts:1: region "one" has no end',
    ],
  },
  {
    name: "a region inside a region",
    scripts: [
      "// #region shared:one\n// #region shared:two\n// #endregion shared:two\n",
      region("two", ""),
    ],
    faults: [
      'a.ts:2: region "two" starts inside region "one"',
      'b.ts:2: region "two" differs from a.ts:3',
    ],
  },
  {
    name: "a marker that is misspelt",
    scripts: ["// #region share:one\n  // #endregion shared:one\n//#region shared:one\n"],
    faults: [
      'a.ts:1: "// #region share:one" is not of the form "// #region shared:<name>"',
      'a.ts:2: "// #endregion shared:one" is not of the form "// #endregion shared:<name>"',
      'a.ts:3: "//#region shared:one" is not of the form "// #region shared:<name>"',
    ],
  },
];

for (const { name, scripts, faults } of DAMAGED) {
  Deno.test(`findFaults() complains about ${name}`, () => {
    assertEquals(check(...scripts), faults);
  });
}

for (
  const statement of [
    'import { a } from "./b.ts";',
    'import type { A } from "./b.ts";',
    'import "./b.ts";',
    'export { a } from "./b.ts";',
    'export * from "./b.ts";',
    'function f() { return import("./b.ts"); }',
  ]
) {
  Deno.test(`findFaults() forbids ${statement}`, () => {
    const fault = 'imports "./b.ts", but a script may only import @std packages and node: modules';
    assertEquals(check("\n" + statement, ""), [`a.ts:2: ${fault}`]);
  });
}

Deno.test("findFaults() forbids imports by URL, of npm packages and by a computed name", () => {
  const text =
    'import "file:///b.ts";\nimport "npm:x";\nawait import(name);\nimport "node:path";\n';
  const rule = "but a script may only import @std packages and node: modules";
  assertEquals(check(text), [
    `a.ts:1: imports "file:///b.ts", ${rule}`,
    `a.ts:2: imports "npm:x", ${rule}`,
    `a.ts:3: imports a computed name, ${rule}`,
  ]);
});

for (
  const declaration of [
    "function same() {}",
    "async function same() {}",
    "function* same() {}",
    "export function same() {}",
    "export default function same() {}",
    "const same = 1;",
    "const other = 1, same = 2;",
    "const { same } = one;",
    "const { one: { two: [a, same = 3] }, ...rest } = one;",
    "const { one, ...same } = one;",
    "let same;",
    "var same;",
    "class same {}",
    "export abstract class same {}",
    "type same = 1;",
    "export type same = 1;",
    "interface same {}",
    "enum same {}",
    "const enum same {}",
    "namespace same {}",
  ]
) {
  Deno.test(`findFaults() complains when two scripts declare one name, by ${declaration}`, () => {
    const fault = '"same" is also declared at a.ts:2';
    assertEquals(check("// é€𝄞\nlet same;", "\n\n" + declaration), [`b.ts:3: ${fault}`]);
  });
}

Deno.test("findFaults() complains when a name is declared in a region and again outside it", () => {
  const text = region("one", "let a;");
  assertEquals(check(text + "let same;", text, "let same;"), [
    'c.ts:1: "same" is also declared at a.ts:4',
  ]);
});

Deno.test("findFaults() sees what follows an array with holes", () => {
  const holes = "const [, a] = [, 1];\nfunction f() { const [, b] = [, 2]; return import(b); }\n";
  assertEquals(check("let same;", holes + "let same;"), [
    "b.ts:2: imports a computed name, but a script may only import @std packages and node: modules",
    'b.ts:3: "same" is also declared at a.ts:1',
  ]);
});

Deno.test("findFaults() accepts overloads and inner names", () => {
  const overloads =
    "function one(a: 1): void;\nfunction one(a: 2): void;\nfunction one() { let x; }";
  assertEquals(check(overloads, "function two() { let x, one; }"), []);
});

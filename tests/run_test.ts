/** Drives tests/run in a small checkout of its own. */

import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { copySync, existsSync } from "@std/fs";
import { fromFileUrl, join } from "@std/path";

const ROOT = fromFileUrl(new URL("..", import.meta.url));

const GOOD: Record<string, string> = {
  "scripts/one.ts": "/** A number. */\nexport const ONE = 1;\n",
  "tests/one_test.ts": 'Deno.test("one", () => {});\nDeno.test("two", () => {});\n',
};

interface Result {
  code: number;
  output: string;
  lastLine: string;
}

/** What tests/run and lib/setup.sh need of the system. */
const TOOLS = "awk cat cmp cp cut dirname find head ls mkdir mktemp mv rm sed sh tail tee tr uname";

/** Runs tests/run in a checkout that holds the files, on a PATH that holds the programs. */
async function runTests(
  files: Record<string, string>,
  options: { args?: string[]; programs?: Record<string, string> } = {},
): Promise<Result> {
  const place = Deno.makeTempDirSync({ prefix: "automaton run " });
  try {
    const root = join(place, "check out");
    const bin = join(place, "bin");
    for (const path of [root, join(root, "tests"), join(root, "scripts"), bin]) {
      Deno.mkdirSync(path);
    }
    for (const name of ["lib", "deno.json", "tests/run"]) {
      copySync(join(ROOT, name), join(root, name));
    }
    for (const [name, text] of Object.entries({ ...GOOD, ...files })) {
      Deno.writeTextFileSync(join(root, name), text);
    }
    for (const tool of TOOLS.split(" ")) {
      const folder = ["/usr/bin", "/bin"].find((path) => existsSync(join(path, tool))) ?? "";
      Deno.symlinkSync(join(folder, tool), join(bin, tool));
    }
    const programs = options.programs ?? { shellcheck: "exit 0", shfmt: "exit 0" };
    for (const [name, text] of Object.entries(programs)) {
      Deno.writeTextFileSync(join(bin, name), `#!/bin/sh\n${text}\n`, { mode: 0o755 });
    }
    const { code, stdout } = await new Deno.Command(join(root, "tests", "run"), {
      args: options.args ?? ["tests", "scripts"],
      cwd: place,
      env: {
        PATH: bin,
        AUTOMATON_DENO: Deno.execPath(),
        // Nothing listens there: the registry of the packages can't be reached.
        HTTPS_PROXY: "http://127.0.0.1:9/",
      },
    }).output();
    const output = new TextDecoder().decode(stdout);
    return { code, output, lastLine: output.trimEnd().split("\n").at(-1) ?? "" };
  } finally {
    Deno.removeSync(place, { recursive: true });
  }
}

function testRun(name: string, fn: () => Promise<void>): void {
  Deno.test({ name: `tests/run ${name}`, ignore: Deno.build.os === "windows", fn });
}

testRun("succeeds when everything is well", async () => {
  const { code, output, lastLine } = await runTests({});
  assertEquals([code, lastLine], [0, "2 passed, 0 failed"], output);
});

testRun("fails when a test fails", async () => {
  const files = { "tests/two_test.ts": 'Deno.test("bad", () => {\n  throw new Error();\n});\n' };
  const { code, output, lastLine } = await runTests(files);
  assertEquals([code, lastLine], [1, "2 passed, 1 failed"], output);
});

testRun("fails when a module of tests does not load", async () => {
  const files = { "tests/two_test.ts": 'throw new Error("not a test");\n' };
  const { code, output, lastLine } = await runTests(files);
  assertEquals([code, lastLine], [1, "2 passed, 1 failed"], output);
});

testRun("fails when a test leaves something open", async () => {
  const files = {
    "tests/two_test.ts": 'Deno.test("leak", () => {\n  Deno.openSync(Deno.execPath());\n});\n',
  };
  const { code, output, lastLine } = await runTests(files);
  assertEquals([code, lastLine], [1, "2 passed, 1 failed"], output);
});

testRun("fails when a documented example does not hold", async () => {
  const example =
    "/**\n * A number.\n *\n * @example\n * ```ts\n * if (ONE < 2) throw new Error();\n * ```\n */\n";
  const files = { "scripts/one.ts": example + "export const ONE = 1;\n" };
  const { code, output, lastLine } = await runTests(files);
  assertEquals([code, lastLine], [1, "2 passed, 1 failed"], output);
});

testRun("runs the tests also when another check fails, and fails", async () => {
  const files = { "scripts/one.ts": "/** A number. */\nexport const ONE =   1;\n" };
  const { code, output, lastLine } = await runTests(files);
  assertEquals([code, lastLine], [1, "2 passed, 1 failed"], output);
  assertStringIncludes(output, "== format: FAILED (exit code 1)\n");
});

testRun("counts each check that fails", async () => {
  const files = {
    "scripts/one.ts": "export let   ONE = 1;\nlet two: string = 3;\n",
    "tests/one_test.ts": 'import "../scripts/one.ts";\nDeno.test("one", () => {});\n',
  };
  const programs = { shellcheck: "exit 1", shfmt: "exit 1" };
  const { code, output, lastLine } = await runTests(files, { programs });
  for (const check of ["format", "lint", "types", "documentation", "shell scripts"]) {
    assertStringIncludes(output, `== ${check}: FAILED`);
  }
  assertStringIncludes(output, "== format of shell scripts: FAILED");
  // The seventh: the test that can't be loaded because of a wrong type.
  assertEquals([code, lastLine], [1, "0 passed, 7 failed"], output);
});

testRun("wants exports documented, but not the members of a type", async () => {
  const member = "/** A pair. */\nexport interface Pair {\n  one: number;\n}\n";
  const good = await runTests({ "scripts/one.ts": member });
  assertEquals([good.code, good.lastLine], [0, "2 passed, 0 failed"], good.output);
  const bad = await runTests({ "scripts/one.ts": member + "export const ONE = 1;\n" });
  assertEquals([bad.code, bad.lastLine], [1, "2 passed, 1 failed"], bad.output);
  assertStringIncludes(bad.output, "export const ONE = 1;");
  assert(!bad.output.includes("one: number;"), bad.output);
});

testRun("fails when no test ran", async () => {
  const { code, output, lastLine } = await runTests({}, {
    args: ["tests", "--filter", "no such test"],
  });
  assertEquals([code, lastLine], [1, "0 passed, 1 failed"], output);
  assertStringIncludes(output, "== tests: FAILED (no test ran)\n");
});

testRun("counts tests that were ignored as skipped", async () => {
  const files = { "tests/two_test.ts": 'Deno.test.ignore("later", () => {});\n' };
  const { code, output, lastLine } = await runTests(files);
  assertEquals([code, lastLine], [0, "2 passed, 0 failed, 1 skipped"], output);
});

testRun("passes arguments on to choose tests", async () => {
  const files = { "tests/two_test.ts": 'Deno.test("three", () => {});\n' };
  const byFile = await runTests(files, { args: ["tests/two_test.ts"] });
  assertEquals([byFile.code, byFile.lastLine], [0, "1 passed, 0 failed"], byFile.output);
  const byName = await runTests(files, { args: ["--filter", "/two|three/"] });
  assertEquals([byName.code, byName.lastLine], [0, "2 passed, 0 failed"], byName.output);
});

testRun("counts a shell checker that is not installed as skipped", async () => {
  const { code, output, lastLine } = await runTests({}, { programs: { shfmt: "exit 0" } });
  assertEquals([code, lastLine], [0, "2 passed, 0 failed, 1 skipped"], output);
  assertStringIncludes(output, "== shell scripts: skipped, shellcheck is not installed\n");
});

import { assertEquals } from "@std/assert";
import { join } from "@std/path";
import { loopDir, makeScratch, ROOT, run, taskDir, writeLoop, writeTask } from "../helpers.ts";
import { KINDS } from "./losses.ts";
import { listSetBacks, Random, readMemory, Tally } from "./support.ts";

/** Prints the table of a record. */
async function print(rows: readonly unknown[]): Promise<{ code: number; stdout: string }> {
  using scratch = makeScratch();
  const record = join(scratch.dir, "record");
  Deno.writeTextFileSync(record, rows.map((row) => `${JSON.stringify(row)}\n`).join(""));
  const table = join(ROOT, "tests", "faults", "table.ts");
  return await run(scratch, [Deno.execPath(), "run", "-q", "--allow-read", table, record]);
}

Deno.test("the table of faults adds up what was tried and lost, and fails for any loss", async () => {
  const calm = { kind: "kill -9", seed: 3, tried: 504, losses: {} };
  const { code, stdout } = await print([calm]);
  assertEquals(code, 0);
  const lines = stdout.split("\n").map((line) => line.split(/ {2,}/));
  assertEquals(lines.filter((cells) => cells[1] !== "not run"), [
    [
      "kind of fault",
      "tried",
      "states lost",
      "wrong passes",
      "processes left",
      "stuck locks",
      "other",
    ],
    ["kill -9", "504", "0", "0", "0", "0", "0"],
    ["in all", "504", "0", "0", "0", "0", "0"],
    ["seed: 3"],
    [""],
  ]);
  assertEquals(
    lines.filter((cells) => cells[1] === "not run"),
    KINDS.filter((kind) => kind !== "kill -9").map((kind) => [kind, "not run", ..."-----"]),
  );
  const bad = { kind: "a full disk", seed: 3, tried: 2, losses: { "wrong passes": 1 } };
  const part = await print([calm, { ...calm, kind: "a save cut off (status)" }]);
  assertEquals(/^a save cut off +not run/m.test(part.stdout), false);
  const both = await print([calm, bad]);
  assertEquals(both.code, 1);
  assertEquals(
    both.stdout.match(/^a full disk .*|^in all .*/gm)?.map((line) => line.split(/ {2,}/)),
    [
      ["a full disk", "2", "0", "1", "0", "0", "0"],
      ["in all", "506", "0", "1", "0", "0", "0"],
    ],
  );
});

Deno.test("a record without a line is a failure", async () => {
  assertEquals((await print([])).code, 1);
});

Deno.test("the list of kinds names all that the files of this folder try, and no other", () => {
  const dir = join(ROOT, "tests", "faults");
  const names = new Set<string>();
  for (const { name } of Deno.readDirSync(dir)) {
    if (!name.endsWith("_test.ts") || name === "table_test.ts") continue;
    const text = Deno.readTextFileSync(join(dir, name));
    const named = /(?:new Tally|^faultTest)\(\s*(?:"([^"]+)"|`([^`$]+) \(\$\{\w+\}\)`)/gm;
    for (const [, kind, partOf] of text.matchAll(named)) names.add((kind ?? partOf)!);
    const unnamed = text.replaceAll(named, "").match(/(new Tally|^faultTest)\(.*/gm) ?? [];
    // The one in the function that makes tests of the kinds it is given.
    const isKnown = (call: string) =>
      name === "resource_test.ts" && call.startsWith("new Tally(kind)");
    assertEquals(unnamed.filter((call) => !isKnown(call)), [], `${name}: kinds without names`);
  }
  assertEquals([...names].sort(), [...KINDS].sort());
});

Deno.test("a look at a project notices what is damaged, lowered or lost", () => {
  const cases: [string, (paths: { loop: string; task: string }) => void, RegExp | null][] = [
    ["nothing", () => {}, null],
    ["a counter that went on", ({ loop }) => change(loop, { iteration_count: 4 }), null],
    ["a damaged copy", ({ loop }) => Deno.writeTextFileSync(`${loop}.bak`, "{"), /loop\.bak: /],
    ["a damaged state", ({ task }) => Deno.writeTextFileSync(task, "{"), /\.state: /],
    [
      "a damaged copy of a task",
      ({ task }) => Deno.writeTextFileSync(`${task}.bak`, ""),
      /\.bak: /,
    ],
    [
      "a torn log",
      ({ loop }) => Deno.writeTextFileSync(loop.replace(/loop$/, "log"), "{"),
      /log: /,
    ],
    ["iterations", ({ loop }) => change(loop, { iteration_count: 2 }), /iteration_count .* 3 to 2/],
    ["approvals", ({ loop }) => change(loop, { resumed_count: 0 }), /resumed_count .* 1 to 0/],
    ["the base", ({ loop }) => change(loop, { iteration_base: 1 }), /iteration_base went back/],
    ["a loop's state", ({ loop }) => Deno.removeSync(loop), /loop night has lost its state/],
    ["a task's state", ({ task }) => Deno.removeSync(task), /task a has lost its state/],
    ["a step", ({ task }) => cutHistory(task), /task a has another history/],
    [
      "an approval",
      ({ task }) => change(task, { approved_at: null }),
      /task a has lost its approval/,
    ],
    ["a phase", ({ task }) => change(task, { phase: "design" }), /task a is in design/],
  ];
  for (const [name, damage, expected] of cases) {
    using scratch = makeScratch("a project");
    const counts = { iteration_count: 3, resumed_count: 1, iteration_base: 2 };
    writeLoop(scratch, "night", {}, counts);
    writeTask(scratch, "a", "spec", { approved_at: new Date().toISOString() });
    const before = readMemory(scratch);
    damage({
      loop: join(loopDir(scratch, "night"), ".state.loop"),
      task: join(taskDir(scratch, "a"), ".state"),
    });
    const found = listSetBacks(before, readMemory(scratch));
    const isAsExpected = expected === null
      ? found.length === 0
      : found.some((problem) => expected.test(problem));
    assertEquals(isAsExpected, true, `${name}: ${found.join("; ")}`);
  }
});

function change(path: string, fields: Readonly<Record<string, unknown>>): void {
  const state = JSON.parse(Deno.readTextFileSync(path));
  Deno.writeTextFileSync(path, JSON.stringify({ ...state, ...fields }));
}

/** Takes the last step but one out of a task's history, whose phase stays right. */
function cutHistory(path: string): void {
  const { history } = JSON.parse(Deno.readTextFileSync(path));
  change(path, { history: history.toSpliced(-2, 1) });
}

Deno.test("a tally that tried nothing, or lost something, fails its test", () => {
  const fails = (tally: Tally): boolean => {
    try {
      tally.close(null);
      return false;
    } catch {
      return true;
    }
  };
  const [empty, calm, bad] = [new Tally("a"), new Tally("b"), new Tally("c")];
  calm.tried = bad.tried = 1;
  calm.check(true, "other", "nothing");
  bad.check(false, "stuck locks", "a lock");
  assertEquals([empty, calm, bad].map(fails), [true, false, true]);
});

Deno.test("the same seed makes the same choices, another one others", () => {
  const choose = (seed: number, stream: string) => {
    const random = new Random(stream, seed);
    return random.shuffle(Array.from({ length: 20 }, (_, index) => index)).join();
  };
  assertEquals(choose(1, "a"), choose(1, "a"));
  assertEquals(new Set([choose(1, "a"), choose(2, "a"), choose(1, "b")]).size, 3);
});

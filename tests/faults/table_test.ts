import { assertEquals } from "@std/assert";
import { join } from "@std/path";
import { makeScratch, ROOT, run } from "../helpers.ts";
import { Random, Tally } from "./support.ts";

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
  assertEquals(stdout.split("\n").map((line) => line.split(/ {2,}/)), [
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
  const bad = { kind: "a full disk", seed: 3, tried: 2, losses: { "wrong passes": 1 } };
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

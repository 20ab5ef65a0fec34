/** Changing a person's crontab: bytes, own lines, and not one byte else. */
import { assert, assertEquals } from "@std/assert";
import {
  bytesToText,
  type CronOwner,
  installCronLines,
  isOwnCronLine,
  quoteCronWord,
  removeCronLines,
  switchCronLines,
  textToBytes,
} from "../scripts/status.ts";
import { fc, THOROUGHNESS } from "./deps.ts";
import { nastyPath } from "./schedule_support.ts";

/** A line of ours as it is installed, before it becomes bytes. */
function makeLine({ unit, script }: CronOwner, times = "*/5 * * * *"): string {
  return `${times} ${quoteCronWord(script)} >>${
    quoteCronWord(`${script}.log`)
  } 2>&1 # automaton-loop:${unit}`;
}

const asBytes = (text: string): string => bytesToText(new TextEncoder().encode(text));

const owner = fc.record({
  unit: fc.stringMatching(/^[a-z0-9][a-z0-9-]{0,8}$/),
  script: nastyPath,
});

/** A line of a person: any bytes, comments, variables, and what looks like ours and is not. */
const foreignLine = (own: CronOwner): fc.Arbitrary<string> =>
  fc.oneof(
    fc.array(fc.integer({ min: 1, max: 255 }).filter((byte) => byte !== 10), { maxLength: 30 })
      .map((bytes) => bytesToText(Uint8Array.from(bytes))),
    fc.constantFrom("", "# a comment", "MAILTO=me", "CRON_TZ=UTC", "0 3 * * * run \\% now\r"),
    fc.constantFrom(
      asBytes(makeLine({ ...own, unit: `${own.unit}x` })),
      asBytes(makeLine({ ...own, unit: `x${own.unit}` })),
      asBytes(makeLine({ ...own, script: `/else${own.script}` })),
      asBytes(makeLine({ ...own, script: `${own.script}.old` })),
      asBytes(`${makeLine(own)} `),
      `# automaton-loop:${own.unit}`,
      `echo # automaton-loop:${own.unit}`,
    ),
  );

const scene = owner.chain((own) =>
  fc.record({
    own: fc.constant(own),
    lines: fc.array(foreignLine(own), { maxLength: 8 }),
    hasFinalNewline: fc.boolean(),
    times: fc.array(fc.constantFrom("0 * * * *", "30 1-23/3 * * *"), {
      minLength: 1,
      maxLength: 3,
    }),
  })
).map(({ own, lines, hasFinalNewline, times }) => ({
  own,
  table: lines.length === 0 ? "" : lines.join("\n") + (hasFinalNewline ? "\n" : ""),
  added: times.map((time) => makeLine(own, time)),
}));

const listForeign = (table: string, own: CronOwner): string[] =>
  table.split("\n").filter((line) => line !== "" && !isOwnCronLine(line, own));

Deno.test("bytes go through text and back, whatever they are", () => {
  fc.assert(fc.property(fc.uint8Array({ maxLength: 20_000 }), (bytes) => {
    assertEquals(textToBytes(bytesToText(bytes)), bytes);
  }));
});

Deno.test("a table is what it was, byte for byte, once lines have come and gone", () => {
  fc.assert(
    fc.property(scene, ({ own, table, added }) => {
      const installed = installCronLines(table, own, added);
      const newline = installed.newlineAddedAfter ?? undefined;
      assertEquals(removeCronLines(installed.table, own, newline), table);
    }),
    { numRuns: 500 * THOROUGHNESS },
  );
});

Deno.test("installed lines stand at the end, whole, and end in a newline", () => {
  fc.assert(fc.property(scene, ({ own, table, added }) => {
    const installed = installCronLines(table, own, added).table;
    assert(installed.endsWith(added.map((line) => `${asBytes(line)}\n`).join("")));
    assert(installed.startsWith(table));
    assertEquals(listForeign(installed, own), listForeign(table, own));
  }));
});

Deno.test("installing again changes the lines where they stand, and nothing else", () => {
  fc.assert(
    fc.property(scene, foreignLine({ unit: "z", script: "/z" }), ({ own, table, added }, last) => {
      const once = installCronLines(table, own, added).table + (last === "" ? "" : `${last}\n`);
      assertEquals(installCronLines(once, own, added), { table: once, newlineAddedAfter: null });
      const other = [makeLine(own, "1 2 3 4 5")];
      const changed = installCronLines(once, own, other).table;
      assertEquals(listForeign(changed, own), listForeign(once, own));
      const rows = changed.split("\n");
      assertEquals(rows.filter((row) => isOwnCronLine(row, own)), other.map(asBytes));
      const place = (text: string) => text.split("\n").findIndex((row) => isOwnCronLine(row, own));
      assertEquals(place(changed), place(once));
    }),
  );
});

Deno.test("a pause comments the lines out and a resumption brings them back; both may come twice", () => {
  fc.assert(fc.property(scene, ({ own, table, added }) => {
    const on = installCronLines(table, own, added).table;
    const off = switchCronLines(on, own, "off");
    assertEquals(listForeign(off, own), listForeign(on, own));
    const own_lines = off.split("\n").filter((line) => isOwnCronLine(line, own));
    assertEquals(own_lines, added.map((line) => `#${asBytes(line)}`));
    assertEquals(switchCronLines(off, own, "off"), off);
    assertEquals(switchCronLines(off, own, "on"), on);
    assertEquals(switchCronLines(on, own, "on"), on);
    assertEquals(removeCronLines(off, own, undefined), removeCronLines(on, own, undefined));
  }));
});

Deno.test("the newline that came with the lines stays when the person has written after it", () => {
  const own = { unit: "night", script: "/p/t.sh" };
  const installed = installCronLines("# mine", own, [makeLine(own)]);
  assertEquals(installed.newlineAddedAfter, "# mine");
  assertEquals(removeCronLines(installed.table, own, "# mine"), "# mine");
  assertEquals(removeCronLines(`${installed.table}# more\n`, own, "# mine"), "# mine\n# more\n");
});

Deno.test("a line of another project with a loop of the same name is not ours", () => {
  const [one, two] = ["/a'/p/t.sh", "/p/t.sh"].map((script) => ({ unit: "night", script }));
  assert(!isOwnCronLine(asBytes(makeLine(one!)), two!));
  assert(!isOwnCronLine(asBytes(makeLine(two!)), one!));
  assert(isOwnCronLine(asBytes(`#${makeLine(one!)}`), one!));
});

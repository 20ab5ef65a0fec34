/**
 * Prints the table of a fault run from the record that the tests wrote, one JSON line a kind of fault.
 * Exits 1 when anything was lost, or nothing was tried at all. Usage: deno run --allow-read table.ts RECORD
 */
import { KINDS, LOSSES, type Row } from "./losses.ts";

function readRows(path: string): Row[] {
  return Deno.readTextFileSync(path).split("\n").filter((line) => line !== "")
    .map((line): Row => JSON.parse(line))
    .sort((a, b) => a.kind < b.kind ? -1 : 1);
}

/** Lays out the rows and the kinds that have none, with a header and a last line of sums. */
export function renderFaultTable(rows: readonly Row[]): string {
  const lost = (row: Row) => LOSSES.map((loss) => row.losses[loss] ?? 0);
  const sums = LOSSES.map((loss) => rows.reduce((sum, row) => sum + (row.losses[loss] ?? 0), 0));
  const tried = rows.reduce((sum, row) => sum + row.tried, 0);
  // "a fault (of this program)" is a part of its kind.
  const isRun = (kind: string) =>
    rows.some((row) => row.kind === kind || row.kind.startsWith(`${kind} (`));
  const missed = KINDS.filter((kind) => !isRun(kind));
  const lines = [
    ["kind of fault", "tried", ...LOSSES],
    ...rows.map((row) => [row.kind, row.tried, ...lost(row)]),
    ...missed.map((kind) => [kind, "not run", ...LOSSES.map(() => "-")]),
    ["in all", tried, ...sums],
  ].map((cells) => cells.map(String));
  const widths = lines[0]!.map((_, column) =>
    Math.max(...lines.map((cells) => cells[column]!.length))
  );
  return lines.map((cells) =>
    cells.map((cell, column) =>
      column === 0 ? cell.padEnd(widths[column]!) : cell.padStart(widths[column]!)
    ).join("  ")
  ).join("\n");
}

if (import.meta.main) {
  const rows = readRows(Deno.args[0]!);
  console.log(`${renderFaultTable(rows)}\nseed: ${rows[0]?.seed ?? "none"}`);
  Deno.exit(
    rows.length > 0 && rows.every(({ losses }) => Object.keys(losses).length === 0) ? 0 : 1,
  );
}

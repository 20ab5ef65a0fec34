/** What the tests of status share: running it, and what each of its answers must look like. */
import { assertEquals, assertMatch } from "@std/assert";
import { lastJson, type Result, type RunOptions, runProgram, type Scratch } from "./helpers.ts";

/** The answer of a command as an object. */
export type Json = Record<string, unknown>;

/** Runs status. */
export function status(
  scratch: Scratch,
  args: readonly string[],
  options: RunOptions = {},
): Promise<Result> {
  return runProgram(scratch, "status", args, options);
}

/** Runs a command that must succeed; returns its JSON, the only line of stdout. */
export async function accept(
  scratch: Scratch,
  args: readonly string[],
  options: RunOptions = {},
): Promise<Json> {
  const result = await status(scratch, [...args, "--json"], options);
  assertEquals(result.code, 0, `${args.join(" ")}\n${result.stdout}${result.stderr}`);
  return readOnlyLine(result);
}

/**
 * Runs a command that must be refused: exit 1, its words and one hint on stderr, the same as JSON.
 *
 * @param words Looked for in `<error> hint: <hint>`.
 */
export async function refuse(
  scratch: Scratch,
  args: readonly string[],
  words: RegExp,
  options: RunOptions = {},
): Promise<void> {
  const result = await status(scratch, [...args, "--json"], options);
  const shown = `${args.join(" ")}\n${result.stdout}${result.stderr}`;
  assertEquals(result.code, 1, shown);
  const { schema_version, ok, error, hint } = readOnlyLine(result);
  assertEquals([schema_version, ok], [1, false], shown);
  assertMatch(`${error}`, /^Cannot .*[^.]$/, shown);
  assertMatch(`${error} hint: ${hint}`, words, shown);
  const lines = result.stderr.trimEnd().split("\n").filter((line) => !/^warning: /.test(line));
  assertEquals(lines, [`status: ${error}`, `hint: ${hint}`], shown);
}

/** Runs a command line that is a usage error: exit 2, one line on stderr. */
export async function misuse(
  scratch: Scratch,
  args: readonly string[],
  words: RegExp,
  options: RunOptions = {},
): Promise<void> {
  const result = await status(scratch, args, options);
  const shown = `${args.join(" ")}\n${result.stdout}${result.stderr}`;
  assertEquals(result.code, 2, shown);
  if (!args.includes("--json")) assertEquals(result.stdout, "", shown);
  assertMatch(result.stderr, /^status: Cannot [^\n]*\n$/, shown);
  assertMatch(result.stderr, words, shown);
}

function readOnlyLine(result: Result): Json {
  const json = lastJson(result);
  assertEquals(result.stdout.trimEnd().split("\n").length, 1, result.stdout);
  assertEquals(json.schema_version, 1, result.stdout);
  return json;
}

/** A time in the past, as state files have it. */
export function daysAgo(days: number): string {
  return new Date(Date.now() - days * 86_400_000).toISOString();
}

/**
 * Words in front of a command that make it run as somebody who may not do everything: root may, so a
 * test of permissions would see nothing. Lets that somebody into the scratch folder.
 */
export function becomeNobody(scratch: Scratch): string[] {
  if (Deno.uid() !== 0) return [];
  Deno.chmodSync(scratch.dir, 0o755);
  return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
}

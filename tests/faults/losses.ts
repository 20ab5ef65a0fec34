/** What a fault must not lead to, and how it is recorded; apart, so that the table needs nothing else. */

/** What must not happen, whatever the fault. */
export type Loss = "states lost" | "wrong passes" | "processes left" | "stuck locks" | "other";

/** The columns of the table, in order. */
export const LOSSES: readonly Loss[] = [
  "states lost",
  "wrong passes",
  "processes left",
  "stuck locks",
  "other",
];

/** Every kind of fault that the files in this folder try; a run says which of them it left out. */
export const KINDS: readonly string[] = [
  "a clock that jumps",
  "a full disk",
  "a git that fails once",
  "a log that cannot be written",
  "a read-only file system",
  "a save cut off",
  "a save that fails",
  "a slow disk",
  "a stale lock of git",
  "broken repositories",
  "commands at once",
  "commits",
  "damaged files",
  "disguises",
  "escapes",
  "injections",
  "kill -9",
  "no permission",
  "orchestrators",
  "outputs deleted in a tick",
  "too many open files",
  "vetoes",
  "worktrees",
  "worktrees, one state after another",
];

/** One line of the record. */
export interface Row {
  readonly kind: string;
  readonly seed: number;
  readonly tried: number;
  readonly losses: Readonly<Partial<Record<Loss, number>>>;
}

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

/** One line of the record. */
export interface Row {
  readonly kind: string;
  readonly seed: number;
  readonly tried: number;
  readonly losses: Readonly<Partial<Record<Loss, number>>>;
}

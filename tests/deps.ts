/** The npm packages that tests use, at exact versions. Programs never import this file. */
// deno-lint-ignore-file no-import-prefix -- the import map is for what the programs use
import { default as fc } from "npm:fast-check@4.3.0";

export { Ajv2020 } from "npm:ajv@8.17.1/dist/2020.js";
export { fc };
export { strToU8, zipSync } from "npm:fflate@0.8.2";

/** How many times the usual number of examples a property is tried with: more in `tests/run --faults`. */
export const THOROUGHNESS = Deno.env.get("AUTOMATON_FAULTS") === "full" ? 20 : 1;

const seed = Deno.env.get("AUTOMATON_FAULT_SEED");
fc.configureGlobal({
  numRuns: 100 * THOROUGHNESS,
  ...seed === undefined ? {} : { seed: Number(seed) | 0 },
});

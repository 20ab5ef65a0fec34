/** The npm packages that tests use, at exact versions. Programs never import this file. */
// deno-lint-ignore-file no-import-prefix -- the import map is for what the programs use
export { Ajv2020 } from "npm:ajv@8.17.1/dist/2020.js";
export { default as fc } from "npm:fast-check@4.3.0";
export { strToU8, zipSync } from "npm:fflate@0.8.2";

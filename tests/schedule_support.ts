/** What the tests of schedules share: readers of what is generated, and words that break bad quoting. */
// deno-lint-ignore-file no-import-prefix -- the import map is for what the programs use
import { fc } from "./deps.ts";
export { Cron } from "npm:croner@10.0.1";
export { DOMParser } from "npm:@xmldom/xmldom@0.9.8";
export { parse as parseYaml } from "npm:yaml@2.8.1";
export { CronJob, type ICronJob } from "npm:kubernetes-models@5.1.0/batch/v1/CronJob";
export { validateWorkflow } from "npm:@action-validator/core@0.6.0";

/** A word with what shells, cron, systemd, XML, YAML and Windows treat in their own way. */
export const nastyWord: fc.Arbitrary<string> = fc.string({
  unit: fc.oneof(
    {
      weight: 3,
      arbitrary: fc.constantFrom(
        ...` '"\\%$\`!#&;|*?~(){}[]<>@:=,-\u00e9\u00a0\u2028\u0085\ud83d\ude80`,
      ),
    },
    { weight: 1, arbitrary: fc.string({ unit: "grapheme", minLength: 1, maxLength: 1 }) },
  ),
  minLength: 1,
  maxLength: 12,
  // deno-lint-ignore no-control-regex -- what checkUnitValue refuses
}).filter((word) => !/[\u0000-\u001f\u007f\ufffe\uffff]/.test(word) && word.isWellFormed());

/** An absolute path of such words. */
export const nastyPath: fc.Arbitrary<string> = fc.array(
  nastyWord.map((word) => word.replaceAll("/", "_")).filter((word) => !/^\.+$/.test(word)),
  { minLength: 1, maxLength: 4 },
).map((words) => `/${words.join("/")}`);

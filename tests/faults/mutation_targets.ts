/** What `mutate.ts` changes, which tests have to notice, and what changes nothing. */

/** Code that everything rests on. */
export interface Target {
  readonly name: string;
  readonly file: string;
  readonly functions: readonly string[];
  /** Arguments of "deno test", the quickest first. */
  readonly tests: readonly (readonly string[])[];
}

/** All targets. */
export const TARGETS: readonly Target[] = [
  {
    name: "verdict",
    file: "scripts/loop-runner.ts",
    functions: [
      "stripNoise",
      "WORDS",
      "ObjectReader",
      "listCandidates",
      "readPass",
      "readScore",
      "readReasons",
      "parseVerdict",
    ],
    tests: [
      // The tests of linear time compare times, which so many runs side by side would spoil.
      ["tests/verdict_test.ts", "--filter", "/^parseVerdict/"],
      ["tests/faults/escape_test.ts", "--filter", "/^parseVerdict/"],
    ],
  },
  {
    name: "save",
    file: "scripts/status.ts",
    functions: ["writeFileAtomic", "replaceFiles", "writeSynced", "syncDirectory", "saveState"],
    tests: [["tests/faults/save_test.ts"]],
  },
  {
    name: "gate",
    file: "scripts/status.ts",
    functions: [
      "isPlateau",
      "isInScope",
      "GATE_CHECKS",
      "findTrip",
      "answerGate",
      "checkIterations",
      "checkBudget",
      "checkTaskPhase",
      "checkDrift",
      "checkPlateau",
      "checkModels",
    ],
    tests: [["tests/faults/gate_test.ts"]],
  },
  {
    name: "escapers",
    file: "scripts/status.ts",
    functions: [
      "quoteShWord",
      "quoteCronWord",
      "quoteSystemdArgument",
      "escapeXml",
      "quoteYaml",
      "quoteWindowsArgument",
    ],
    tests: [["tests/schedule_quoting_test.ts"]],
  },
];

/** Mutants that change nothing that anybody could see, and why. */
export const EQUIVALENT: readonly {
  readonly name: string;
  /** What else stands in its line, where the same may stand in others. */
  readonly line?: string;
  readonly from: string;
  readonly to: string;
  readonly why: string;
}[] = [
  ...[["/^[\\w:\\\\./=-]+$/.test(word)", "false"], ["/^[\\w:\\\\./=-]+$/", "/(?!)/g"]].map((
    [from, to],
  ) => ({
    name: "quoteWindowsArgument",
    from: from!,
    to: to!,
    why: "a plain word is read the same with quotes around it",
  })),
  {
    name: "ObjectReader",
    line: "#at = 0;",
    from: "0",
    to: "1",
    why: "read() sets it before anything is read",
  },
  {
    name: "ObjectReader",
    line: "this.#at < this.text.length",
    from: "<",
    to: "<=",
    why: "behind the end of the text there is no character that would be taken for anything",
  },
  {
    name: "ObjectReader",
    line: "    return BROKEN;",
    from: "return BROKEN;",
    to: "return null as never;",
    why: "the text has ended, so nothing can close the object around the string",
  },
  {
    name: "parseVerdict",
    line: "material = ",
    from: '""',
    to: '"mutant"',
    why: "neither holds a verdict",
  },
  {
    name: "listCandidates",
    line: "fence < at",
    from: "<",
    to: "<=",
    why: "a fence and a brace never stand in the same place",
  },
  ...[["fence < end", "true"], ["<", "<="]].map(([from, to]) => ({
    name: "listCandidates",
    line: "fence < end",
    from: from!,
    to: to!,
    why: "finds the same fence once more: that takes time and nothing else",
  })),
  {
    name: "isPlateau",
    from: ">",
    to: ">=",
    why: "the first score would be compared with none, and nothing is above none",
  },
  {
    name: "answerGate",
    from: '""',
    to: '"mutant"',
    why: "neither is a time, so neither is waited for",
  },
  ...[["1000", "1001"], [">", ">="], ["0", "1"], ["<=", "<"]].map(([from, to]) => ({
    name: "answerGate",
    line: from === "1000" ? "longestMs" : "waitMs",
    from: from!,
    to: to!,
    why: "differs in the very millisecond at which a wait begins or ends, which nobody can hit",
  })),
  {
    name: "syncDirectory",
    from: 'Deno.build.os === "windows"',
    to: "false",
    why: "true on Windows alone, where these tests do not run",
  },
  {
    name: "syncDirectory",
    from: '"windows"',
    to: '""',
    why: "true on Windows alone, where these tests do not run",
  },
];

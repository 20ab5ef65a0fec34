/** vram-detect as a command: options, exit codes, the report's form, the table for people. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { join } from "@std/path";
import { lastJson, makeScratch, runProgram, type Scratch, writeFile } from "./helpers.ts";
import { buildFamily, buildModel, FAMILIES } from "./gguf_builder.ts";
import { at, MIB, writeFamily, writeModels } from "./vram_support.ts";
import { DETECT_OPTIONS } from "../scripts/vram-detect.ts";

const detect = (scratch: Scratch, ...args: string[]) => runProgram(scratch, "vram-detect", args);

Deno.test("vram-detect --help lists every option of the table; --version is the framework's", async () => {
  using scratch = makeScratch();
  const help = await detect(scratch, "--help");
  assertEquals([help.code, help.stderr], [0, ""]);
  for (const { name } of DETECT_OPTIONS) assertStringIncludes(help.stdout, `  --${name} `);
  const version = await detect(scratch, "--version");
  assertMatch(version.stdout, /^vram-detect \d+\.\d+\.\d+\n$/);
});

Deno.test("vram-detect names a flag that it does not know, or whose value is wrong, and exits with 2", async () => {
  using scratch = makeScratch();
  const cases: [string[], RegExp][] = [
    [["--modle", "a"], /Cannot read flag "--modle": unknown \(did you mean --model\?\)/],
    [["--jsn"], /did you mean --json\?/],
    [["--model"], /Cannot read flag "--model": its value is missing/],
    [["--model="], /Cannot read flag "--model": its value is missing/],
    [["--slots", "0"], /Cannot read flag "--slots": "0" is not a whole number from 1/],
    [["--slots", "many"], /"many" is not a whole number/],
    [["--context", "1.5"], /Cannot read flag "--context"/],
    [["--free-mib", "1e5"], /Cannot read flag "--free-mib"/],
    [["--ubatch", "70000"], /Cannot read flag "--ubatch"/],
    [
      ["--kv-type", "q8"],
      /Cannot read flag "--kv-type": "q8" is no cache type \(did you mean q8_0\?\)/,
    ],
    [
      ["--kv-type-v", "constructor"],
      /Cannot read flag "--kv-type-v": "constructor" is no cache type/,
    ],
    [["model.gguf"], /Cannot read argument "model\.gguf"/],
  ];
  for (const [args, message] of cases) {
    const { code, stdout, stderr } = await detect(scratch, ...args);
    assertEquals([code, stdout], [2, ""], args.join(" "));
    assertMatch(stderr, message);
  }
});

Deno.test("vram-detect --json prints one line whose fields are the contract", async () => {
  using scratch = makeScratch();
  const path = writeFamily(scratch, "gpt-oss-20b");
  const result = await detect(
    scratch,
    "--json",
    `--model=${path}`,
    "--free-mib=9000",
    "--context",
    "131072",
  );
  assertEquals([result.code, result.stderr], [0, ""]);
  assertEquals(result.stdout.split("\n").length, 2);
  const report = lastJson(result);
  assertEquals(Object.keys(report), [
    "schema_version",
    "available_context_tokens",
    "available_context_kb",
    "loop_mode_eligible",
    "floor_tokens",
    "reason",
    "hint",
    "source",
    "model",
    "devices",
    "probes",
    "memory",
    "memory_at_context",
    "budget",
    "assumptions",
    "warnings",
  ]);
  assertEquals([report.schema_version, report.floor_tokens, report.source], [1, 16000, "gguf"]);
  assertEquals(report.memory_at_context, {
    context_tokens: 131072,
    weights_bytes: 128,
    kv_bytes: 3072 * MIB,
    kv_swa_bytes: 18 * MIB,
    recurrent_bytes: 0,
    compute_bytes: 4 * 512 * (2880 + 201088 + 131072),
    total_bytes: 128 + 3090 * MIB + 4 * 512 * (2880 + 201088 + 131072),
  });
  assertEquals(at(report, "budget", "terms"), [{
    device: "--free-mib",
    free_bytes: 9000 * MIB,
    headroom_bytes: 1024 * MIB,
    usable_bytes: 7976 * MIB,
  }]);
});

Deno.test("vram-detect decides on the exact figure and prints it rounded down to 256", async () => {
  using scratch = makeScratch();
  const path = writeFamily(scratch, "Qwen3-8B");
  const figures = async (freeMib: string) => {
    const report = lastJson(
      await detect(scratch, "--json", "--loop-mode", "--model", path, "--free-mib", freeMib),
    );
    return [
      at(report, "budget", "exact_context_tokens"),
      report.available_context_tokens,
      report.loop_mode_eligible,
    ];
  };
  assertEquals(await figures("3617"), [16049, 15872, true]);
  assertEquals(await figures("3609"), [15992, 15872, false]);
});

Deno.test("vram-detect gives null when the model does not fit, saying what it needs", async () => {
  using scratch = makeScratch();
  const path = writeFamily(scratch, "Qwen3-8B");
  for (const freeMib of ["1", "1024", "1328", "1340"]) {
    const result = await detect(
      scratch,
      "--json",
      "--loop-mode",
      "--model",
      path,
      "--free-mib",
      freeMib,
    );
    const report = lastJson(result);
    assertEquals([result.code, report.available_context_tokens, report.loop_mode_eligible], [
      1,
      null,
      false,
    ]);
    assertMatch(
      `${report.reason}`,
      /the model does not fit: 256 tokens need 341\.25 MiB, the budget is/,
    );
  }
});

Deno.test("vram-detect says when a model was made for fewer tokens than are ever printed", async () => {
  using scratch = makeScratch();
  const { architecture, keys } = FAMILIES["Qwen3-8B"]!;
  const path = join(scratch.project, "tiny.gguf");
  Deno.writeFileSync(path, buildModel(architecture, { ...keys, "context_length": 255 }));
  const result = await detect(scratch, "--json", "--model", path, "--free-mib", "9000");
  assertEquals([result.code, lastJson(result).available_context_tokens], [1, null]);
  assertEquals(lastJson(result).reason, "the model was made for 255 tokens, fewer than 256");
});

Deno.test("vram-detect lets no name from outside steer the terminal", async () => {
  using scratch = makeScratch();
  for (const args of [["--model", "a\x1b[31mb\nc"], ["--model", "a\x1b[31mb\nc", "--explain"]]) {
    const { stdout, stderr } = await detect(scratch, ...args);
    assertStringIncludes(stdout + stderr, 'Cannot find model "a?[31mb?c"');
    assert(!/[^\P{Cc}\n]/u.test(stdout + stderr), stdout + stderr);
  }
});

Deno.test("vram-detect without --json prints the number alone; reasons and hints go to stderr", async () => {
  using scratch = makeScratch();
  writeModels(scratch, { default: "a", models: { a: { context_tokens: 9000 } } });
  const small = await detect(scratch, "--loop-mode");
  assertEquals([small.code, small.stdout], [0, "9000\n"]);
  assertMatch(
    small.stderr,
    /^vram-detect: a context window of 9000 tokens is below.*\nhint: .*\n$/,
  );
  const none = await detect(scratch, "--model", "b");
  assertEquals([none.code, none.stdout], [1, ""]);
  assertMatch(none.stderr, /^vram-detect: Cannot find model "b".*\nhint: .*\n$/);
});

Deno.test("vram-detect --explain shows the derivation term by term, and what would raise the answer", async () => {
  using scratch = makeScratch();
  const path = writeFamily(scratch, "Qwen3-8B");
  const args = ["--explain", "--model", path, "--free-mib", "3000", "--slots", "2"];
  const { code, stdout, stderr } = await detect(scratch, ...args);
  assertEquals(code, 0);
  assertMatch(stderr, /^hint: .*declare context_tokens in models\.json\n$/);
  for (
    const line of [
      /^ {2}architecture +qwen3$/m,
      /^ {2}--free-mib +3000\.00 MiB {2}free of 3000\.00 MiB, what-if$/m,
      /^Need of 11721 tokens$/m,
      /^ {2}KV cache +1648\.27 MiB {2}147456 bytes a token$/m,
      /^ {2}compute buffer +327\.64 MiB {2}of it 2048 bytes a token$/m,
      /^ {2}together +1975\.91 MiB$/m,
      /^ {2}--free-mib +1976\.00 MiB {2}3000\.00 MiB free - 1024\.00 MiB headroom$/m,
      /^ {2}context +11520 tokens, exactly 11721, limited by memory$/m,
      /^ {2}fit for loops +no: a context window of 11721 tokens is below the floor of$/m,
      /^What would raise it$/m,
      /^ {2}- {2}--kv-type q8_0: \d+ tokens$/m,
      /^ {2}- {2}1 GiB more free memory: \d+ tokens$/m,
    ]
  ) assertMatch(stdout, line);
  assert(stdout.split("\n").every((line) => line === line.trimEnd()), stdout);
  // With --json, stdout is left to the one line.
  const both = await detect(scratch, ...args, "--json");
  assertEquals(both.stdout.split("\n").length, 2);
  assertStringIncludes(both.stderr, "What would raise it");
  assertEquals(lastJson(both).available_context_tokens, 11520);
});

Deno.test("vram-detect --explain says where a declared figure comes from, and why there is none", async () => {
  using scratch = makeScratch();
  const none = await detect(scratch, "--explain");
  assertEquals(none.code, 1);
  assertMatch(none.stdout, /^ {2}context +unknown$/m);
  writeModels(scratch, { default: "a", models: { a: { context_tokens: 64000 } } });
  const declared = await detect(scratch, "--explain");
  assertMatch(declared.stdout, /^ {2}context +64000 tokens, from models\.json$/m);
});

Deno.test("vram-detect --context answers beside a declared window", async () => {
  using scratch = makeScratch();
  writeFamily(scratch, "Qwen3-8B");
  writeModels(scratch, {
    default: "a",
    models: { a: { context_tokens: 64000, gguf: "../model.gguf" } },
  });
  const report = lastJson(await detect(scratch, "--json", "--context", "40960"));
  assertEquals([report.source, report.available_context_tokens], ["models.json", 64000]);
  assertEquals(at(report, "memory_at_context", "kv_bytes"), 5760 * MIB);
});

Deno.test("vram-detect refuses a cache type whose block does not divide a head", async () => {
  using scratch = makeScratch();
  const path = join(scratch.project, "odd.gguf");
  const { architecture, keys } = FAMILIES["Llama-3-8B"]!;
  Deno.writeFileSync(path, buildModel(architecture, { ...keys, "attention.key_length": 80 }));
  const args = ["--json", "--model", path, "--free-mib", "9000"];
  assertEquals((await detect(scratch, ...args)).code, 0);
  const { code, stdout } = await detect(scratch, ...args, "--kv-type", "q8_0");
  assertEquals(code, 1);
  assertStringIncludes(stdout, "its block of 32 does not divide a head of 80");
});

Deno.test("vram-detect takes paths with spaces, quotes, %, $, a leading dash and other alphabets", async () => {
  using scratch = makeScratch();
  for (const name of ["a b.gguf", "it's %d $HOME.gguf", "-dash.gguf", "模型 ü.gguf", "a\nb.gguf"]) {
    writeFamily(scratch, "Qwen3-8B", name);
    for (const path of [join(scratch.project, name), `./${name}`]) {
      const result = await detect(scratch, "--json", "--free-mib", "9000", "--model", path);
      assertEquals([result.code, lastJson(result).available_context_tokens], [0, 40960], path);
    }
  }
});

Deno.test("vram-detect refuses what is no regular file, without waiting on it", async () => {
  using scratch = makeScratch();
  const pipe = join(scratch.project, "pipe.gguf");
  new Deno.Command("mkfifo", { args: [pipe] }).outputSync();
  const empty = join(scratch.project, "empty.gguf");
  writeFile(empty, "");
  const folder = join(scratch.project, "folder.gguf");
  Deno.mkdirSync(folder);
  const cases: [string, RegExp][] = [
    [pipe, /not a regular file/],
    ["/dev/zero", /not a regular file/],
    [empty, /ends inside the magic number at offset 0/],
    [folder, /config\.json": no such file/],
    [join(scratch.project, "none.gguf"), /none\.gguf": no such file/],
  ];
  for (const [path, reason] of cases) {
    const result = await detect(scratch, "--json", "--free-mib", "9000", "--model", path);
    assertEquals(result.code, 1);
    assertMatch(`${lastJson(result).reason}`, reason);
  }
});

Deno.test("vram-detect warns of bytes that no tensor explains and counts them as weights", async () => {
  using scratch = makeScratch();
  const path = join(scratch.project, "long.gguf");
  const bytes = buildFamily("Qwen3-8B");
  const longer = new Uint8Array(bytes.length + 1000);
  longer.set(bytes);
  Deno.writeFileSync(path, longer);
  const report = lastJson(await detect(scratch, "--json", "--free-mib", "9000", "--model", path));
  assertEquals(at(report, "memory", "weights_bytes"), 128 + 1000);
  assertMatch(`${at(report, "warnings", 0)}`, /1000 bytes follow the last tensor's data/);
});

Deno.test("vram-detect flags an upper bound in JSON and as a warning", async () => {
  using scratch = makeScratch();
  const path = writeFamily(scratch, "an unknown architecture");
  const result = await detect(scratch, "--json", "--free-mib", "9000", "--model", path);
  assertEquals(at(lastJson(result), "model", "is_upper_bound"), true);
  assertMatch(
    `${at(lastJson(result), "warnings", 0)}`,
    /^upper bound: architecture "brandnew" is not known/,
  );
  const refused = writeFamily(scratch, "DeepSeek-V3.2", "dsa.gguf");
  assertEquals((await detect(scratch, "--free-mib", "9000", "--model", refused)).code, 1);
});

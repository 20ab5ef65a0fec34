/** Where a figure comes from: the environment, models.json, Hugging Face folders, ollama. */
import { assert, assertEquals, assertMatch, assertThrows } from "@std/assert";
import { join } from "@std/path";
import { lastJson, makeScratch, runProgram, type Scratch, writeFile } from "./helpers.ts";
import { buildFamily } from "./gguf_builder.ts";
import {
  at,
  F16,
  lettersOf,
  MIB,
  shapeOf,
  sourceOf,
  writeFamily,
  writeModels,
} from "./vram_support.ts";
import {
  describeModel,
  memoryAtContext,
  parseHfConfig,
  parseOllamaManifest,
  parseOllamaName,
  readSafetensorsBytes,
  RefusedError,
} from "../scripts/vram-detect.ts";

/** Runs the program with --json. */
async function detect(scratch: Scratch, args: string[] = [], env: Record<string, string> = {}) {
  const result = await runProgram(scratch, "vram-detect", ["--json", ...args], { env });
  return { code: result.code, report: lastJson(result) };
}

/** Source, figure, eligible: what most tests look at. */
function answer(report: Record<string, unknown>): unknown[] {
  return [report.source, report.available_context_tokens, report.loop_mode_eligible];
}

Deno.test("AUTOMATON_CONTEXT_TOKENS answers before everything else", async () => {
  using scratch = makeScratch();
  writeModels(scratch, { default: "a", models: { a: { context_tokens: 200000 } } });
  const { code, report } = await detect(scratch, ["--loop-mode"], {
    AUTOMATON_CONTEXT_TOKENS: "65536",
  });
  assertEquals([code, ...answer(report)], [0, "env", 65536, true]);
  assertEquals(report.available_context_kb, 65536);
});

Deno.test("AUTOMATON_CONTEXT_TOKENS that is no number of tokens is refused, not passed over", async () => {
  using scratch = makeScratch();
  writeModels(scratch, { default: "a", models: { a: { context_tokens: 200000 } } });
  for (const value of ["32k", "-1", "0", "1.5", "1e9", "99999999999999999999"]) {
    const { code, report } = await detect(scratch, [], { AUTOMATON_CONTEXT_TOKENS: value });
    assertEquals([code, ...answer(report)], [1, "none", null, false]);
    assertEquals(
      report.reason,
      `Cannot use AUTOMATON_CONTEXT_TOKENS "${value}": not a whole number of tokens above 0`,
    );
  }
});

Deno.test("models.json declares the window of its default and of a named model", async () => {
  using scratch = makeScratch();
  writeModels(scratch, {
    default: "a",
    models: { a: { context_tokens: 131072 }, "b c": { context_tokens: 8192 } },
  });
  assertEquals(answer((await detect(scratch)).report), ["models.json", 131072, true]);
  const small = await detect(scratch, ["--model", "b c", "--loop-mode"]);
  assertEquals([small.code, ...answer(small.report)], [0, "models.json", 8192, false]);
  assertMatch(`${small.report.reason}`, /8192 tokens is below the floor of 16000 tokens/);
});

Deno.test("models.json of the framework counts where the project has none, comments and all", async () => {
  using scratch = makeScratch();
  const framework = join(scratch.dir, "framework");
  writeFile(
    join(framework, "models.json"),
    '{ // remote\n "default": "far", "models": {"far": {"context_tokens": 1000000,},},}',
  );
  const env = { AUTOMATON_HOME: framework };
  assertEquals(answer((await detect(scratch, [], env)).report), ["models.json", 1000000, true]);
  writeModels(scratch, { default: "near", models: { near: { context_tokens: 32000 } } });
  assertEquals(answer((await detect(scratch, [], env)).report), ["models.json", 32000, true]);
});

Deno.test("a window can be asked for outside of a project, but not in a project that is named wrongly", async () => {
  using scratch = makeScratch();
  const { report } = await detect(scratch, [], { AUTOMATON_PROJECT: join(scratch.dir, "nowhere") });
  assertMatch(`${report.reason}`, /Cannot open project/);
  const args = ["--json", "--free-mib", "9000", "--model", writeFamily(scratch, "Qwen3-8B")];
  const outside = await runProgram(scratch, "vram-detect", args, { cwd: scratch.home });
  assertEquals(answer(lastJson(outside)), ["gguf", 40960, true]);
});

Deno.test("a models.json that cannot be used is a reason, never an answer", async () => {
  using scratch = makeScratch();
  const path = join(scratch.project, ".automaton", "models.json");
  const cases: [string, RegExp][] = [
    ["", /Cannot parse ".*models\.json": it is empty/],
    ["{torn", /Cannot parse ".*models\.json"/],
    ["[]", /found \[\], wanted an object/],
    [
      '{"models": {"a": {"context_tokens": "big"}}}',
      /field models\.a\.context_tokens: found "big"/,
    ],
    ['{"models": {"a": {"context_tokens": 0}}}', /field models\.a\.context_tokens: found 0/],
    ['{"models": {"a": {"slots": 1.5}}}', /field models\.a\.slots/],
    ['{"default": 3, "models": {}}', /field default/],
    [
      '{"default": "a", "models": {"a": {"gguf": "x.gguf", "kv_type": "q3"}}}',
      /Cannot use cache type "q3": it is none of f32/,
    ],
    ['{"models": {"a": {"gguf": "x.gguf", "mmproj": 7}}}', /field models\.a\.mmproj: found 7/],
    ['{"default": "__proto__", "models": {}}', /Cannot find model "__proto__"/],
  ];
  for (const [text, reason] of cases) {
    writeFile(path, text);
    const { code, report } = await detect(scratch);
    assertEquals([code, ...answer(report)], [1, "none", null, false]);
    assertMatch(`${report.reason}`, reason);
    assert(typeof report.hint === "string" && report.hint !== "");
  }
});

Deno.test("models.json: gguf, kv_type, slots and mmproj of a model; flags go before them", async () => {
  using scratch = makeScratch();
  Deno.writeFileSync(join(scratch.project, ".automaton", "m.gguf"), buildFamily("gpt-oss-20b"));
  writeFile(join(scratch.home, "eyes.gguf"), "x".repeat(1000));
  writeModels(scratch, {
    default: "local",
    models: { local: { gguf: "m.gguf", kv_type: "q8_0", slots: 4, mmproj: "~/eyes.gguf" } },
  });
  const { code, report } = await detect(scratch, ["--free-mib", "9000", "--context", "131072"]);
  assertEquals([code, report.source], [0, "gguf"]);
  assertEquals(at(report, "memory", "projector_bytes"), 1000);
  assertEquals(at(report, "memory_at_context", "weights_bytes"), 128 + 1000);
  assertEquals(at(report, "memory_at_context", "kv_bytes"), 3072 * MIB * 34 / 64);
  assertEquals(at(report, "memory_at_context", "kv_swa_bytes"), 24 * MIB * 34 / 64);
  const flags = ["--kv-type", "f16", "--kv-type-v", "q4_0", "--slots", "1"];
  const other = await detect(scratch, ["--free-mib", "9000", ...flags]);
  const assumed = (name: string) => at(other.report, "assumptions", name);
  assertEquals(["kv_type_k", "kv_type_v", "slots"].map(assumed), ["f16", "q4_0", 1]);
});

Deno.test("paths of models.json begin at its own folder, the framework's at the framework", async () => {
  using scratch = makeScratch();
  const framework = join(scratch.dir, "framework");
  const models = { default: "m", models: { m: { gguf: "files/m.gguf", mmproj: "files/eyes" } } };
  for (const folder of [join(framework, "files"), join(scratch.project, ".automaton", "files")]) {
    writeFile(join(folder, "eyes"), "x".repeat(folder.length));
    Deno.writeFileSync(join(folder, "m.gguf"), buildFamily("Qwen3-8B"));
  }
  writeFile(join(framework, "models.json"), JSON.stringify(models));
  const paths = async () => {
    const { report } = await detect(scratch, ["--free-mib", "9000"], { AUTOMATON_HOME: framework });
    return [at(report, "model", "path"), at(report, "memory", "projector_bytes")];
  };
  const there = join(framework, "files");
  assertEquals(await paths(), [join(there, "m.gguf"), there.length]);
  writeModels(scratch, models);
  const here = join(scratch.project, ".automaton", "files");
  assertEquals(await paths(), [join(here, "m.gguf"), here.length]);
  Deno.removeSync(join(here, "eyes"));
  const { report } = await detect(scratch, ["--free-mib", "9000"], { AUTOMATON_HOME: framework });
  assertMatch(`${report.reason}`, /files\/eyes": no such file$/);
});

Deno.test("a window that is declared needs no model file; --free-mib beside it is not passed over in silence", async () => {
  using scratch = makeScratch();
  writeModels(scratch, {
    default: "a",
    models: { a: { context_tokens: 20000, gguf: "gone.gguf" } },
  });
  const { code, report } = await detect(scratch, ["--free-mib", "9000"]);
  assertEquals([code, ...answer(report)], [0, "models.json", 20000, true]);
  assertEquals(report.warnings, ["--free-mib is not looked at: models.json declares the window"]);
  const env = { AUTOMATON_CONTEXT_TOKENS: "30000" };
  const asked = await detect(scratch, ["--context", "9000"], env);
  assertEquals([asked.code, ...answer(asked.report)], [1, "env", 30000, true]);
  assertMatch(`${asked.report.reason}`, /gone\.gguf": no such file$/);
});

Deno.test("no model at all is a null with a reason and a hint", async () => {
  using scratch = makeScratch();
  const { code, report } = await detect(scratch, ["--loop-mode"]);
  assertEquals([code, ...answer(report)], [1, "none", null, false]);
  assertMatch(`${report.reason}`, /no model is declared/);
  assertMatch(`${report.hint}`, /--model/);
});

// Hugging Face folders.

/** Family of the builder's table → the same model's config.json. */
const HF_CONFIGS: [string, Record<string, unknown>][] = [
  ["Llama-3-8B", {
    model_type: "llama",
    num_hidden_layers: 32,
    hidden_size: 4096,
    num_attention_heads: 32,
    num_key_value_heads: 8,
    vocab_size: 128256,
    max_position_embeddings: 8192,
  }],
  ["Mistral-7B-v0.2", {
    model_type: "mistral",
    num_hidden_layers: 32,
    hidden_size: 4096,
    num_attention_heads: 32,
    num_key_value_heads: 8,
    sliding_window: 4096,
    vocab_size: 32000,
    max_position_embeddings: 32768,
  }],
  ["Qwen3-8B", {
    model_type: "qwen3",
    num_hidden_layers: 36,
    hidden_size: 4096,
    num_attention_heads: 32,
    num_key_value_heads: 8,
    head_dim: 128,
    sliding_window: null,
    use_sliding_window: false,
    vocab_size: 151936,
    max_position_embeddings: 40960,
  }],
  ["gpt-oss-20b", {
    model_type: "gpt_oss",
    num_hidden_layers: 24,
    hidden_size: 2880,
    num_attention_heads: 64,
    num_key_value_heads: 8,
    head_dim: 64,
    sliding_window: 128,
    layer_types: Array.from(
      { length: 24 },
      (_, i) => i % 2 === 0 ? "sliding_attention" : "full_attention",
    ),
    vocab_size: 201088,
    max_position_embeddings: 131072,
  }],
  ["DeepSeek-V3", {
    model_type: "deepseek_v3",
    num_hidden_layers: 61,
    hidden_size: 7168,
    num_attention_heads: 128,
    num_key_value_heads: 128,
    kv_lora_rank: 512,
    qk_rope_head_dim: 64,
    qk_nope_head_dim: 128,
    v_head_dim: 128,
    vocab_size: 129280,
    max_position_embeddings: 163840,
  }],
  ["Gemma-3-12B", {
    model_type: "gemma3",
    text_config: {
      model_type: "gemma3_text",
      num_hidden_layers: 48,
      hidden_size: 3840,
      num_attention_heads: 16,
      num_key_value_heads: 8,
      head_dim: 256,
      sliding_window: 1024,
      sliding_window_pattern: 6,
      vocab_size: 262208,
      max_position_embeddings: 131072,
    },
  }],
  ["Qwen3.5-9B", {
    model_type: "qwen3_5",
    num_hidden_layers: 32,
    hidden_size: 4096,
    num_attention_heads: 16,
    num_key_value_heads: 4,
    head_dim: 256,
    full_attention_interval: 4,
    layer_types: Array.from(
      { length: 32 },
      (_, i) => (i + 1) % 4 === 0 ? "full_attention" : "linear_attention",
    ),
    linear_conv_kernel_dim: 4,
    linear_key_head_dim: 128,
    linear_num_key_heads: 16,
    linear_num_value_heads: 32,
    linear_value_head_dim: 128,
    vocab_size: 248320,
    max_position_embeddings: 262144,
  }],
  ["Jamba", {
    model_type: "jamba",
    num_hidden_layers: 8,
    hidden_size: 4096,
    num_attention_heads: 32,
    num_key_value_heads: 8,
    attn_layer_period: 8,
    attn_layer_offset: 4,
    mamba_d_conv: 4,
    mamba_d_state: 16,
    mamba_expand: 2,
    vocab_size: 65536,
    max_position_embeddings: 262144,
  }],
  ["LFM2", {
    model_type: "lfm2",
    num_hidden_layers: 6,
    hidden_size: 2048,
    num_attention_heads: 32,
    num_key_value_heads: 8,
    layer_types: ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    conv_L_cache: 3,
    vocab_size: 65536,
    max_position_embeddings: 128000,
  }],
];

for (const [family, config] of HF_CONFIGS) {
  Deno.test(`parseHfConfig() gives ${family} the memory that its GGUF file has`, () => {
    const shape = describeModel(parseHfConfig(JSON.stringify(config), "config.json"));
    const memory = (of: typeof shape) => memoryAtContext({ shape: of, weightsBytes: 0 }, F16, 8192);
    assertEquals(memory(shape), memory(shapeOf(family)));
    assertEquals(shape.nativeTokens, shapeOf(family).nativeTokens);
  });
}

Deno.test("parseHfConfig() refuses an indexer and text that is no object; an unknown type is a bound", () => {
  const indexed = { ...HF_CONFIGS[4]![1], model_type: "deepseek_v32", index_topk: 2048 };
  assertThrows(() => describeModel(parseHfConfig(JSON.stringify(indexed), "c")), RefusedError);
  assertThrows(() => parseHfConfig("[]", "c"), RefusedError);
  const unknown = { ...HF_CONFIGS[0]![1], model_type: "toString" };
  assertEquals(describeModel(parseHfConfig(JSON.stringify(unknown), "c")).upperBounds.length, 1);
});

/** A small config.json: 8 layers, 4 of 8 heads hold KV, heads of 64. */
const SMALL_CONFIG = {
  num_hidden_layers: 8,
  hidden_size: 512,
  num_attention_heads: 8,
  num_key_value_heads: 4,
  vocab_size: 1000,
  sliding_window: 1024,
};
const SLIDING = "sliding_attention";
const FULL = "full_attention";

/** `model_type` and what is beside it → the architecture, and its layers as letters. */
const HF_LAYERS: [string, Record<string, unknown>, string, string][] = [
  ["cohere", {}, "command-r", "FFFFFFFF"],
  ["deepseek_v2", {}, "deepseek2", "FFFFFFFF"],
  ["deepseek_v3", {}, "deepseek2", "FFFFFFFF"],
  ["falcon_h1", { mamba_d_conv: 4, mamba_d_state: 16, mamba_d_ssm: 64 }, "falcon-h1", "bbbbbbbb"],
  ["gemma3_text", { sliding_window_pattern: 4 }, "gemma3", "sssFsssF"],
  ["gemma3n_text", { num_kv_shared_layers: 3 }, "gemma3n", "ssssF---"],
  ["glm4_moe", {}, "glm4moe", "FFFFFFFF"],
  ["gpt_oss", {}, "gpt-oss", "sFsFsFsF"],
  [
    "granitemoehybrid",
    {
      layers_block_type: ["mamba", "mamba", "attention", ...Array(5).fill("mamba")],
      ...{ mamba_d_conv: 4, mamba_d_state: 16, mamba_expand: 2, mamba_n_groups: 1 },
    },
    "granitehybrid",
    "rrFrrrrr",
  ],
  ["kimi_k2", {}, "deepseek2", "FFFFFFFF"],
  ["lfm2_moe", { conv_L_cache: 3, layer_types: Array(8).fill("conv") }, "lfm2moe", "rrrrrrrr"],
  [
    "llama4_text",
    { layer_types: Array.from("ssFFssFF", (l) => l === "s" ? "chunked_attention" : FULL) },
    "llama4",
    "ssFFssFF",
  ],
  ["minimax_m2", {}, "minimax-m2", "FFFFFFFF"],
  ["mistral", {}, "llama", "FFFFFFFF"],
  ["mixtral", {}, "llama", "FFFFFFFF"],
  [
    "nemotron_h",
    {
      hybrid_override_pattern: "M-M*-M--",
      ...{
        conv_kernel: 4,
        ssm_state_size: 16,
        n_groups: 8,
        mamba_num_heads: 4,
        mamba_head_dim: 32,
      },
    },
    "nemotron_h",
    "r-rF-r--",
  ],
  ["phi", {}, "phi2", "FFFFFFFF"],
  ["qwen2_moe", {}, "qwen2moe", "FFFFFFFF"],
  [
    "qwen3_next",
    {
      ...{ linear_conv_kernel_dim: 4, linear_key_head_dim: 128, linear_num_key_heads: 2 },
      ...{ linear_num_value_heads: 4, linear_value_head_dim: 128 },
    },
    "qwen3next",
    "rrrFrrrF",
  ],
  ["qwen3_moe", {}, "qwen3moe", "FFFFFFFF"],
  ["cohere2", {}, "cohere2", "sssFsssF"],
  ["cohere2", { use_sliding_window: false }, "cohere2", "FFFFFFFF"],
  [
    "cohere2",
    { layer_types: [SLIDING, FULL, FULL, FULL, SLIDING, FULL, FULL, FULL] },
    "cohere2",
    "sFFFsFFF",
  ],
  [
    "jamba",
    {
      attn_layer_period: 4,
      attn_layer_offset: 1,
      mamba_d_conv: 4,
      mamba_d_state: 16,
      mamba_expand: 2,
    },
    "jamba",
    "rFrrrFrr",
  ],
];

for (const [modelType, more, architecture, letters] of HF_LAYERS) {
  Deno.test(`parseHfConfig() reads ${modelType} with ${Object.keys(more)[0] ?? "no more"} as ${architecture} ${letters}`, () => {
    const text = JSON.stringify({ ...SMALL_CONFIG, ...more, model_type: modelType });
    const shape = describeModel(parseHfConfig(text, "config.json"));
    assertEquals([shape.architecture, lettersOf(shape.layers)], [architecture, letters]);
    assertEquals([shape.upperBounds, shape.vocabTokens], [[], 1000]);
    assertEquals(shape.headElements[0], [64, 64]);
  });
}

Deno.test("parseHfConfig() takes V as wide as it is said to be, and K and V apart from the embedding", () => {
  const config = { ...SMALL_CONFIG, model_type: "llama", head_dim: 96, v_head_dim: 32 };
  const { layers } = describeModel(parseHfConfig(JSON.stringify(config), "c"));
  assertEquals([layers[0]?.keyElements, layers[0]?.valueElements], [4 * 96, 4 * 32]);
});

Deno.test("parseHfConfig() refuses a number that is none, rather than to take another in its place", () => {
  for (const value of ["8", [8, 8], {}, true]) {
    const config = { ...SMALL_CONFIG, model_type: "llama", num_key_value_heads: value };
    const read = () => describeModel(parseHfConfig(JSON.stringify(config), "c"));
    assertThrows(read, RefusedError, `num_key_value_heads is ${JSON.stringify(value)}`);
  }
});

/** A safetensors file of some tensors of some bytes, one after another. */
function buildSafetensors(
  sizes: number[],
  change: (header: Record<string, unknown>) => void = () => {},
) {
  const header: Record<string, unknown> = { __metadata__: { format: "pt" } };
  let end = 0;
  for (const [index, size] of sizes.entries()) {
    header[`t${index}`] = { dtype: "U8", shape: [size], data_offsets: [end, end += size] };
  }
  change(header);
  const text = new TextEncoder().encode(JSON.stringify(header));
  const bytes = new Uint8Array(8 + text.length + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(text, 8);
  return bytes;
}

Deno.test("readSafetensorsBytes() adds the tensors up and refuses holes, overlaps and cut files", () => {
  const read = (bytes: Uint8Array) => readSafetensorsBytes(sourceOf(bytes), "m.safetensors");
  const whole = buildSafetensors([100, 28, 0]);
  assertEquals(read(whole), 128);
  for (let size = 0; size < whole.length; size++) {
    assertThrows(() => read(whole.subarray(0, size)), RefusedError);
  }
  const set = (offsets: unknown) =>
    buildSafetensors([100, 28], (header) => header.t1 = { dtype: "U8", data_offsets: offsets });
  for (const offsets of [[99, 128], [101, 128], [100], "100", [128, 100], [0, 128], [100.5, 128]]) {
    assertThrows(() => read(set(offsets)), RefusedError);
  }
  // A tensor that ends before it begins, in a file that is as long as it says.
  const back = buildSafetensors([64], (header) => {
    header.t0 = { dtype: "U8", data_offsets: [0, 100] };
    header.t1 = { dtype: "U8", data_offsets: [100, 64] };
  });
  assertThrows(() => read(back), RefusedError, "a tensor from 100 to 64");
  const huge = whole.slice();
  huge.fill(0xff, 0, 8);
  assertThrows(() => read(huge), RefusedError);
});

Deno.test("a folder with config.json and safetensors is a model; the index says which files count", async () => {
  using scratch = makeScratch();
  const dir = join(scratch.project, "my model");
  writeFile(join(dir, "config.json"), JSON.stringify(HF_CONFIGS[2]![1]));
  const args = ["--free-mib", "9000", "--model", dir];
  assertMatch(`${(await detect(scratch, args)).report.reason}`, /holds no safetensors files/);
  for (const name of ["a", "b", "c"]) {
    Deno.writeFileSync(join(dir, `${name}.safetensors`), buildSafetensors([1000]));
  }
  const all = await detect(scratch, args);
  assertEquals([all.code, ...answer(all.report)], [0, "hf", 40960, true]);
  assertEquals(at(all.report, "memory", "weights_bytes"), 3000);
  const index = (map: unknown) =>
    writeFile(join(dir, "model.safetensors.index.json"), JSON.stringify({ weight_map: map }));
  index({ x: "a.safetensors", y: "b.safetensors", z: "a.safetensors" });
  assertEquals(at((await detect(scratch, args)).report, "memory", "weights_bytes"), 2000);
  index({ x: "../a.safetensors" });
  assertEquals((await detect(scratch, args)).code, 1);
  index({ x: "gone.safetensors" });
  assertMatch(`${(await detect(scratch, args)).report.reason}`, /gone\.safetensors": no such file/);
});

Deno.test("a model folder is never waited on, nor read without end", async () => {
  using scratch = makeScratch();
  const dir = join(scratch.project, "m");
  const config = join(dir, "config.json");
  const mkfifo = (path: string) => new Deno.Command("mkfifo", { args: [path] }).outputSync();
  const reason = async () =>
    `${(await detect(scratch, ["--free-mib", "9000", "--model", dir])).report.reason}`;
  Deno.mkdirSync(dir);
  mkfifo(config);
  assertMatch(await reason(), /config\.json": not a regular file$/);
  Deno.removeSync(config);
  writeFile(config, "");
  Deno.truncateSync(config, 2 ** 24 + 1);
  assertMatch(await reason(), /config\.json": 16777217 bytes are too many$/);
  Deno.truncateSync(config, 0);
  writeFile(config, JSON.stringify(HF_CONFIGS[2]![1]));
  mkfifo(join(dir, "a.safetensors"));
  assertMatch(await reason(), /a\.safetensors": not a regular file$/);
  Deno.removeSync(join(dir, "a.safetensors"));
  Deno.writeFileSync(join(dir, "model.safetensors"), buildSafetensors([8]));
  Deno.writeFileSync(join(dir, "other.safetensors"), buildSafetensors([8]));
  const args = ["--free-mib", "9000", "--model", join(dir, "config.json")];
  assertEquals(at((await detect(scratch, args)).report, "memory", "weights_bytes"), 8);
  for (const text of ["{", "[]", '{"model_type": "llama", "num_hidden_layers": "many"}']) {
    writeFile(config, text);
    assertMatch(await reason(), /Cannot parse|wanted an object|num_hidden_layers is "many"/);
  }
});

Deno.test("a name is a model of models.json, else of ollama, else a folder; what looks like a path is one", async () => {
  using scratch = makeScratch();
  const folder = join(scratch.project, "twin");
  writeFile(join(folder, "config.json"), JSON.stringify(HF_CONFIGS[0]![1]));
  Deno.writeFileSync(join(folder, "model.safetensors"), buildSafetensors([8]));
  const source = async (model: string) =>
    (await detect(scratch, ["--free-mib", "9000", "--model", model])).report.source;
  assertEquals([await source("twin"), await source("./twin")], ["hf", "hf"]);
  const home = join(scratch.home, ".ollama", "models");
  writeOllamaModel(home, "registry.ollama.ai/library/twin/latest", "Qwen3-8B", 1);
  assertEquals([await source("twin"), await source("./twin")], ["ollama", "hf"]);
  writeModels(scratch, { models: { twin: { context_tokens: 50000 } } });
  assertEquals([await source("twin"), await source("twin/")], ["models.json", "hf"]);
});

// ollama.

Deno.test("parseOllamaName() finds the manifest of every form of a name, and of nothing else", () => {
  const cases: [string, string | null][] = [
    ["qwen3", "manifests/registry.ollama.ai/library/qwen3/latest"],
    ["qwen3:8b", "manifests/registry.ollama.ai/library/qwen3/8b"],
    ["someone/thing:v1", "manifests/registry.ollama.ai/someone/thing/v1"],
    ["hf.co/org/repo-GGUF:Q4_K_M", "manifests/hf.co/org/repo-GGUF/Q4_K_M"],
    ["localhost:5000/a/b", "manifests/localhost:5000/a/b/latest"],
    ["../../etc/passwd", null],
    ["a/../b", null],
    ["", null],
    ["a:", null],
    ["a:b:c", null],
    [":5000/a/b", null],
    ["a/b/c/d", null],
    ["with space", null],
  ];
  for (const [name, path] of cases) assertEquals(parseOllamaName(name), path, name);
});

Deno.test("parseOllamaManifest() wants exactly one model with a true digest", () => {
  const layer = (kind: string, digest: string) => ({
    mediaType: `application/vnd.ollama.image.${kind}`,
    digest,
  });
  const digest = `sha256:${"0a".repeat(32)}`;
  const parse = (...layers: unknown[]) => parseOllamaManifest(JSON.stringify({ layers }), "m");
  assertEquals(
    parse(layer("template", digest), layer("model", digest), layer("projector", digest)),
    {
      model: `blobs/sha256-${"0a".repeat(32)}`,
      extras: [`blobs/sha256-${"0a".repeat(32)}`],
    },
  );
  const odd = [
    [],
    [null, 3],
    [layer("model", "sha256:../../x")],
    [layer("model", digest), layer("model", digest)],
    [layer("model", digest), layer("projector", "sha256:1")],
  ];
  for (const layers of odd) assertThrows(() => parse(...layers), RefusedError);
});

/** Writes an ollama model below a models folder. */
function writeOllamaModel(
  models: string,
  manifest: string,
  family: string,
  projectorBytes: number,
) {
  const digests = ["1".repeat(64), "2".repeat(64)] as const;
  writeFile(join(models, "blobs", `sha256-${digests[1]}`), "p".repeat(projectorBytes));
  Deno.writeFileSync(join(models, "blobs", `sha256-${digests[0]}`), buildFamily(family));
  const layers = digests.map((digest, index) => ({
    mediaType: `application/vnd.ollama.image.${index === 0 ? "model" : "projector"}`,
    digest: `sha256:${digest}`,
  }));
  writeFile(join(models, "manifests", manifest), JSON.stringify({ schemaVersion: 2, layers }));
}

Deno.test("an ollama model is found by its name, in the home folder and in OLLAMA_MODELS", async () => {
  using scratch = makeScratch();
  const home = join(scratch.home, ".ollama", "models");
  writeOllamaModel(home, "registry.ollama.ai/library/qwen3/8b", "Qwen3-8B", 5000);
  const args = ["--free-mib", "9000", "--model", "qwen3:8b"];
  const { code, report } = await detect(scratch, args);
  assertEquals([code, ...answer(report)], [0, "ollama", 40960, true]);
  assertEquals(at(report, "memory", "projector_bytes"), 5000);
  // OLLAMA_MODELS replaces the home folder.
  const elsewhere = join(scratch.dir, "else where");
  const missing = await detect(scratch, args, { OLLAMA_MODELS: elsewhere });
  assertMatch(`${missing.report.reason}`, /Cannot find model "qwen3:8b"/);
  writeOllamaModel(elsewhere, "registry.ollama.ai/library/qwen3/8b", "Llama-3-8B", 1);
  const other = await detect(scratch, args, { OLLAMA_MODELS: elsewhere });
  assertEquals(answer(other.report), ["ollama", 8192, false]);
});

Deno.test("an ollama model with a blob that is missing or no file is refused; adapters count", async () => {
  using scratch = makeScratch();
  const models = join(scratch.home, ".ollama", "models");
  const manifest = join(models, "manifests", "registry.ollama.ai", "library", "q", "latest");
  const blob = (digit: string) => join(models, "blobs", `sha256-${digit.repeat(64)}`);
  const args = ["--free-mib", "9000", "--model", "q"];
  writeOllamaModel(models, "registry.ollama.ai/library/q/latest", "Qwen3-8B", 5);
  const text = Deno.readTextFileSync(manifest);
  writeFile(manifest, text.replace("image.projector", "image.adapter"));
  assertEquals(at((await detect(scratch, args)).report, "memory", "projector_bytes"), 5);
  Deno.removeSync(blob("2"));
  assertMatch(`${(await detect(scratch, args)).report.reason}`, /sha256-2+": no such file$/);
  writeFile(blob("2"), "");
  Deno.removeSync(blob("1"));
  new Deno.Command("mkfifo", { args: [blob("1")] }).outputSync();
  assertMatch(`${(await detect(scratch, args)).report.reason}`, /sha256-1+": not a regular file$/);
  writeFile(manifest, text.replace(/sha256:2+/, "sha256:../../x"));
  const { code, report } = await detect(scratch, args);
  assertEquals([code, ...answer(report)], [1, "none", null, false]);
  Deno.removeSync(manifest);
  new Deno.Command("mkfifo", { args: [manifest] }).outputSync();
  assertMatch(`${(await detect(scratch, args)).report.reason}`, /Cannot find model "q"/);
});

Deno.test("a model of models.json without window and file is looked for in ollama", async () => {
  using scratch = makeScratch();
  const home = join(scratch.home, ".ollama", "models");
  writeOllamaModel(home, "registry.ollama.ai/library/qwen3/latest", "Qwen3-8B", 1);
  writeModels(scratch, { default: "qwen3", models: { qwen3: { local: true, slots: 2 } } });
  const { report } = await detect(scratch, ["--free-mib", "9000"]);
  assertEquals(answer(report), ["ollama", 40960, true]);
  assertEquals(at(report, "assumptions", "slots"), 2);
});

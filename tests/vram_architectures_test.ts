/**
 * What each architecture keeps, layer by layer. The expectations are written down from the
 * architectures' own sources, not computed: a changed table of the program must fail here.
 */
import { assert, assertEquals, assertThrows } from "@std/assert";
import { buildGguf, buildModel, type MetadataValue } from "./gguf_builder.ts";
import { F16, lettersOf, readBytes } from "./vram_support.ts";
import {
  describeModel,
  memoryAtContext,
  type ModelShape,
  RefusedError,
} from "../scripts/vram-detect.ts";

/** Keys of a small model: 12 layers, 4 of 8 heads hold KV, heads of 64, a vocabulary of 1000. */
const SMALL: Record<string, MetadataValue> = {
  "block_count": 12,
  "context_length": 65536,
  "embedding_length": 512,
  "attention.head_count": 8,
  "attention.head_count_kv": 4,
  "vocab_size": 1000,
};
const WINDOW: Record<string, MetadataValue> = { "attention.sliding_window": 1024 };
const SSM: Record<string, MetadataValue> = {
  "ssm.conv_kernel": 4,
  "ssm.inner_size": 1024,
  "ssm.state_size": 16,
  "ssm.group_count": 2,
};
/** 4 · ((4 − 1) · (1024 + 2 · 2 · 16) + 16 · 1024) */
const SSM_BYTES = 78592;

function shapeWith(architecture: string, keys: Record<string, MetadataValue>): ModelShape {
  return describeModel(readBytes(buildModel(architecture, { ...SMALL, ...keys })));
}

const headless = (...full: number[]) =>
  Array.from({ length: 12 }, (_, layer) => full.includes(layer) ? 4 : 0);

/** Architecture, its keys, its layers, its window or the bytes of a state. */
const LAYERS: [string, Record<string, MetadataValue>, string, number][] = [
  ["afmoe", WINDOW, "sssFsssFsssF", 1024],
  ["cohere2", WINDOW, "sssFsssFsssF", 1024],
  ["exaone-moe", WINDOW, "sssFsssFsssF", 1024],
  ["exaone4", WINDOW, "FFFFFFFFFFFF", 0],
  ["gemma2", {}, "sFsFsFsFsFsF", 4096],
  ["gemma2", WINDOW, "sFsFsFsFsFsF", 1024],
  ["gemma3", {}, "FFFFFFFFFFFF", 0],
  ["gemma3", WINDOW, "sssssFsssssF", 1024],
  ["gemma3n", WINDOW, "ssssFssssFss", 1024],
  ["gpt-oss", WINDOW, "sFsFsFsFsFsF", 1024],
  ["llama4", {}, "sssFsssFsssF", 8192],
  ["llama4", WINDOW, "sssFsssFsssF", 8192],
  ["olmo2", {}, "FFFFFFFFFFFF", 0],
  ["olmo2", WINDOW, "sssFsssFsssF", 1024],
  ["smallthinker", WINDOW, "FsssFsssFsss", 1024],

  ["falcon-h1", SSM, "bbbbbbbbbbbb", SSM_BYTES],
  ["granitehybrid", { ...SSM, "attention.head_count_kv": headless(5) }, "rrrrrFrrrrrr", SSM_BYTES],
  ["jamba", { ...SSM, "attention.head_count_kv": headless(4, 8) }, "rrrrFrrrFrrr", SSM_BYTES],
  ["plamo2", { ...SSM, "attention.head_count_kv": headless(1) }, "rFrrrrrrrrrr", SSM_BYTES],
  ["mamba", SSM, "rrrrrrrrrrrr", SSM_BYTES],
  ["mamba2", SSM, "rrrrrrrrrrrr", SSM_BYTES],
  ["qwen3next", SSM, "rrrFrrrFrrrF", SSM_BYTES],
  ["qwen35", SSM, "rrrFrrrFrrrF", SSM_BYTES],
  ["qwen35moe", { ...SSM, "full_attention_interval": 6 }, "rrrrrFrrrrrF", SSM_BYTES],
  [
    "lfm2",
    { "shortconv.l_cache": 3, "attention.head_count_kv": headless(2, 5) },
    "rrFrrFrrrrrr",
    4 * 512 * 2,
  ],
  [
    "lfm2moe",
    { "shortconv.l_cache": 3, "attention.head_count_kv": headless(2, 5) },
    "rrFrrFrrrrrr",
    4 * 512 * 2,
  ],
  ["rwkv6", { "wkv.head_size": 64 }, "rrrrrrrrrrrr", 4 * 512 * (2 + 64)],
  ["rwkv7", { "wkv.head_size": 64 }, "rrrrrrrrrrrr", 4 * 512 * (2 + 64)],
  ["rwkv6qwen2", { "wkv.head_size": 64 }, "rrrrrrrrrrrr", 4 * 512 * (1 + 64)],
  ["arwkv7", { "wkv.head_size": 64 }, "rrrrrrrrrrrr", 4 * 512 * (1 + 64)],
  ...["nemotron_h", "nemotron_h_moe"].map((
    name,
  ): [string, Record<string, MetadataValue>, string, number] => [
    name,
    {
      ...SSM,
      "attention.head_count_kv": headless(3),
      "feed_forward_length": [0, 9, 0, 0, 9, 0, 9, 0, 9, 0, 9, 0],
    },
    "r-rF-r-r-r-r",
    SSM_BYTES,
  ]),
];

for (const [architecture, keys, letters, size] of LAYERS) {
  Deno.test(`describeModel() reads ${architecture} with ${Object.keys(keys)[0] ?? "no more keys"} as ${letters}`, () => {
    const shape = shapeWith(architecture, keys);
    assertEquals(lettersOf(shape.layers), letters);
    const states = new Set(
      shape.layers.map((layer) => layer.stateBytes).filter((bytes) => bytes > 0),
    );
    assertEquals(states.size > 0 ? [...states] : [shape.windowTokens], [size]);
    assertEquals(shape.upperBounds, []);
  });
}

Deno.test("describeModel() reads exaone4 of 64 layers with its window", () => {
  const shape = shapeWith("exaone4", { ...WINDOW, "block_count": 64 });
  assertEquals(lettersOf(shape.layers), "sssF".repeat(16));
});

Deno.test("describeModel() lets the last layers share: by the file, in gemma3n after 20 of them", () => {
  const shared = shapeWith("gemma4", {
    ...WINDOW,
    "attention.sliding_window_pattern": Array.from({ length: 12 }, (_, layer) => layer % 3 < 2),
    "attention.shared_kv_layers": 5,
  });
  assertEquals(lettersOf(shared.layers), "ssFssFs-----");
  const gemma3n = shapeWith("gemma3n", { ...WINDOW, "block_count": 30 });
  assertEquals(lettersOf(gemma3n.layers), "ssssF".repeat(4) + "-".repeat(10));
});

Deno.test("describeModel() counts every layer as full where a window has no pattern, and says so", () => {
  for (const architecture of ["cohere2moe", "gemma4", "mimo2", "step35"]) {
    const shape = shapeWith(architecture, WINDOW);
    assertEquals(lettersOf(shape.layers), "F".repeat(12));
    assertEquals(shape.upperBounds, [
      "the file does not say which layers slide: every layer counts as full",
    ]);
    const told = shapeWith(architecture, { ...WINDOW, "attention.sliding_window_pattern": 3 });
    assertEquals(lettersOf(told.layers), "ssFssFssFssF");
  }
});

Deno.test("describeModel() knows the plain architectures, and their window is no saving", () => {
  const names = [
    ...["llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3vl", "phi2", "phi3"],
    ...["deepseek2", "glm4", "glm4moe", "granite", "granitemoe", "command-r", "minimax-m2", "grok"],
    ...[
      "falcon",
      "gemma",
      "olmo",
      "starcoder2",
      "stablelm",
      "ernie4_5-moe",
      "hunyuan-moe",
      "dots1",
    ],
  ];
  for (const name of names) {
    const shape = shapeWith(name, WINDOW);
    assertEquals([lettersOf(shape.layers), shape.upperBounds], ["F".repeat(12), []], name);
  }
});

Deno.test("describeModel() refuses architectures with an indexer, whatever their keys", () => {
  for (const architecture of ["deepseek32", "deepseek4", "glm-dsa"]) {
    assertThrows(() => shapeWith(architecture, {}), RefusedError, "an indexer with a cache");
  }
});

Deno.test("describeModel() believes nothing that makes the figure of an unknown architecture smaller", () => {
  const plain = shapeWith("brandnew", {});
  const full = { keyElements: 4 * 64, valueElements: 4 * 64, isSliding: false, stateBytes: 0 };
  assertEquals(plain.layers, Array(12).fill(full));
  const keys: Record<string, MetadataValue>[] = [
    WINDOW,
    { "attention.shared_kv_layers": 11 },
    { "attention.key_length_mla": 192, "attention.value_length_mla": 128 },
    { "attention.head_count_kv": headless(3) },
  ];
  for (const more of keys) assertEquals(shapeWith("brandnew", more).layers, plain.layers);
});

Deno.test("describeModel() takes K alone with MLA, on full and on sliding layers", () => {
  const mla = {
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_swa": 288,
    "attention.value_length_swa": 256,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.head_count_kv": 1,
  };
  const shape = shapeWith("gpt-oss", { ...mla, ...WINDOW });
  assertEquals(shape.layers.slice(0, 2), [
    { keyElements: 288, valueElements: 0, isSliding: true, stateBytes: 0 },
    { keyElements: 576, valueElements: 0, isSliding: false, stateBytes: 0 },
  ]);
  assertEquals(shape.headElements, [[576, 0], [288, 0]]);
});

const NOTHING: [string, Record<string, MetadataValue>, RegExp][] = [
  ["llama", { "attention.head_count_kv": 0 }, /none of its layers keeps anything/],
  ["llama", { "attention.shared_kv_layers": 12 }, /none of its layers keeps anything/],
  ["llama", { "attention.key_length": 0 }, /llama\.attention\.key_length is 0/],
  ["llama", { "attention.value_length": 0 }, /llama\.attention\.value_length is 0/],
  ["llama", { "context_length": 0 }, /llama\.context_length is 0/],
  ["llama", { "embedding_length": 0 }, /llama\.embedding_length is 0/],
  ["llama", { "embedding_length": 4 }, /llama\.attention\.key_length is 0/],
  ["llama", { "vocab_size": 0 }, /llama\.vocab_size is 0/],
  ["mamba", { ...SSM, "ssm.inner_size": 0 }, /mamba\.ssm\.inner_size is 0/],
  ["rwkv6", { "wkv.head_size": 0 }, /rwkv6\.wkv\.head_size is 0/],
  ["lfm2", { "shortconv.l_cache": 0 }, /lfm2\.shortconv\.l_cache is 0/],
  [
    "llama",
    { "context_length": { type: "u64", value: 2 ** 31 + 1 } },
    /context_length is 2147483649/,
  ],
  ["llama", { "attention.head_count_kv": ["4"] }, /llama\.attention\.head_count_kv is no number/],
  ["llama", { "attention.head_count_kv": "4".repeat(300) }, /head_count_kv is no number/],
  [
    "llama",
    { "attention.head_count_kv": Array<number>(1025).fill(4) },
    /head_count_kv is no number/,
  ],
  ["gemma3", { ...WINDOW, "attention.sliding_window_pattern": ["s"] }, /pattern is no number/],
];

for (const [architecture, keys, message] of NOTHING) {
  Deno.test(`describeModel() refuses ${architecture} when ${Object.keys(keys).at(-1)} is ${`${Object.values(keys).at(-1)}`.slice(0, 20)}`, () => {
    const error = assertThrows(() => shapeWith(architecture, keys), RefusedError);
    assert(message.test(error.message), error.message);
  });
}

Deno.test("describeModel() takes up to 1024 layers and contexts up to 2^31", () => {
  assertEquals(shapeWith("llama", { "block_count": 1024 }).layers.length, 1024);
  assertThrows(() => shapeWith("llama", { "block_count": 1025 }), RefusedError, "1025 layers");
  const long = shapeWith("llama", { "context_length": { type: "u64", value: 2 ** 31 } });
  assertEquals(long.nativeTokens, 2 ** 31);
  assertEquals(
    shapeWith("llama", { "attention.head_count_kv": Array(1024).fill(4) }).layers.length,
    12,
  );
});

Deno.test("memoryAtContext() is the sum of its terms", () => {
  const shape = shapeWith("gemma3", WINDOW);
  const settings = { kvTypeK: "f32", kvTypeV: "q8_0", slots: 3, ubatchTokens: 64 };
  assertEquals(memoryAtContext({ shape, weightsBytes: 7 }, settings, 5000), {
    context_tokens: 5000,
    weights_bytes: 7,
    kv_bytes: 2 * 5000 * (4 * 256 + 34 * 8),
    // 3 windows and a batch are 3136 cells, padded to 3328.
    kv_swa_bytes: 10 * 3328 * (4 * 256 + 34 * 8),
    recurrent_bytes: 0,
    compute_bytes: 4 * 64 * (512 + 1000 + 5000),
    total_bytes: 7 + 12960000 + 43130880 + 1667072,
  });
  const twice = memoryAtContext({ shape: shapeWith("mamba", SSM), weightsBytes: 0 }, {
    ...F16,
    slots: 2,
  }, 0);
  assertEquals(twice.recurrent_bytes, 2 * 12 * SSM_BYTES);
});

/** Number of a tensor type → bytes of 256 of its numbers, from the sizes of ggml's block structs. */
const TENSOR_BYTES: Record<number, number> = {
  ...{ 0: 1024, 1: 512, 2: 144, 3: 160, 6: 176, 7: 192, 8: 272, 9: 288, 10: 84, 11: 110, 12: 144 },
  ...{ 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98, 19: 50, 20: 144, 21: 110, 22: 82 },
  ...{ 23: 136, 24: 256, 25: 512, 26: 1024, 27: 2048, 28: 2048, 29: 56, 30: 512, 34: 54, 35: 66 },
  ...{ 39: 136, 40: 144, 41: 36, 42: 72 },
};

Deno.test("readGguf() knows the size of every tensor type, and refuses removed and new ones", () => {
  for (let type = 0; type < 60; type++) {
    const tensors = [{ name: "t", shape: [256, 4], type }];
    const header = buildGguf({ metadata: [], tensors, hasData: false });
    const size = 4 * (TENSOR_BYTES[type] ?? 300);
    const bytes = new Uint8Array(header.length + size);
    bytes.set(header);
    if (TENSOR_BYTES[type] === undefined) {
      assertThrows(() => readBytes(bytes), RefusedError, `of type ${type}`);
    } else {assertEquals(
        [readBytes(bytes).weightsBytes, readBytes(bytes).surplusBytes],
        [size, 0],
        `${type}`,
      );}
  }
});

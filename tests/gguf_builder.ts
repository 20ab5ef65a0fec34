/**
 * Makes GGUF files for tests: valid ones of any architecture, and damaged ones.
 *
 * Written from the description of the format (ggml's gguf.md, version 3), apart from the reader that
 * it tests: little-endian; magic, version, counts; keys with typed values; tensors; padding; data.
 *
 * @module
 */

/** A metadata value: a number is u32, a list of numbers an array of i32. */
export type MetadataValue =
  | number
  | string
  | boolean
  | number[]
  | boolean[]
  | string[]
  | { type: keyof typeof SCALARS; value: number | bigint };

/** A tensor; its data is written as zeros, or not at all. */
export interface TensorSpec {
  name: string;
  /** Fastest dimension first, as in ggml. */
  shape: number[];
  /** ggml's number of the type: 0 f32, 1 f16, 8 q8_0 … */
  type: number;
  /** Offset of the data, where it is to be a wrong one. */
  offset?: number;
}

/** What a file is to hold. */
export interface GgufSpec {
  version?: number;
  metadata: [string, MetadataValue][];
  tensors?: TensorSpec[];
  /** False leaves out the tensors' data, for sparse files. */
  hasData?: boolean;
}

const SCALARS = {
  u8: [0, 1],
  i8: [1, 1],
  u16: [2, 2],
  i16: [3, 2],
  u32: [4, 4],
  i32: [5, 4],
  f32: [6, 4],
  bool: [7, 1],
  u64: [10, 8],
  i64: [11, 8],
  f64: [12, 8],
} as const;

/** Elements and bytes of a block, for the types that tests use. */
const BLOCKS: Record<number, [number, number]> = {
  0: [1, 4],
  1: [1, 2],
  8: [32, 34],
  12: [256, 144],
};
const ALIGNMENT = 32;

/** Collects bytes; notes where each length stands, so that tests can damage them. */
export class GgufWriter {
  #bytes: number[] = [];
  /** Offsets of all 64-bit lengths and counts. */
  readonly lengthOffsets: number[] = [];

  scalar(type: keyof typeof SCALARS, value: number | bigint): void {
    const [, size] = SCALARS[type];
    const buffer = new ArrayBuffer(8);
    const view = new DataView(buffer);
    if (type === "f32") view.setFloat32(0, Number(value), true);
    else if (type === "f64") view.setFloat64(0, Number(value), true);
    else view.setBigInt64(0, BigInt(value), true);
    this.#bytes.push(...new Uint8Array(buffer, 0, size));
  }

  length(value: number | bigint): void {
    this.lengthOffsets.push(this.#bytes.length);
    this.scalar("u64", value);
  }

  text(value: string): void {
    const bytes = new TextEncoder().encode(value);
    this.length(bytes.length);
    for (const byte of bytes) this.#bytes.push(byte);
  }

  value(value: MetadataValue): void {
    if (typeof value === "string") {
      this.scalar("u32", 8);
      this.text(value);
    } else if (Array.isArray(value)) this.#array(value);
    else if (typeof value === "object") this.#typed(value.type, value.value);
    else if (typeof value === "boolean") this.#typed("bool", value ? 1 : 0);
    else this.#typed("u32", value);
  }

  #typed(type: keyof typeof SCALARS, value: number | bigint): void {
    this.scalar("u32", SCALARS[type][0]);
    this.scalar(type, value);
  }

  #array(items: number[] | boolean[] | string[]): void {
    const first = items[0];
    const type = typeof first === "string" ? 8 : typeof first === "boolean" ? 7 : 5;
    this.scalar("u32", 9);
    this.scalar("u32", type);
    this.length(items.length);
    for (const item of items) {
      if (typeof item === "string") this.text(item);
      else if (typeof item === "boolean") this.scalar("bool", item ? 1 : 0);
      else this.scalar("i32", item);
    }
  }

  pad(): void {
    while (this.#bytes.length % ALIGNMENT !== 0) this.#bytes.push(0);
  }

  get size(): number {
    return this.#bytes.length;
  }

  finish(): Uint8Array {
    return Uint8Array.from(this.#bytes);
  }
}

/** Bytes of a tensor's data. */
export function tensorBytes({ shape, type }: TensorSpec): number {
  const [elements, bytes] = BLOCKS[type] ?? [1, 1];
  return shape.reduce((product, size) => product * size, 1) / elements * bytes;
}

const padded = (size: number) => Math.ceil(size / ALIGNMENT) * ALIGNMENT;

/** Bytes of a file's data, padding included. */
export function dataBytes(tensors: readonly TensorSpec[]): number {
  return tensors.reduce((sum, tensor) => sum + padded(tensorBytes(tensor)), 0);
}

/** Makes a file, and says where its lengths stand. */
export function buildGgufParts(spec: GgufSpec): { bytes: Uint8Array; lengthOffsets: number[] } {
  const tensors = spec.tensors ?? [];
  const writer = new GgufWriter();
  writer.scalar("u32", 0x46554747);
  writer.scalar("u32", spec.version ?? 3);
  writer.length(tensors.length);
  writer.length(spec.metadata.length);
  for (const [key, value] of spec.metadata) {
    writer.text(key);
    writer.value(value);
  }
  let offset = 0;
  for (const tensor of tensors) {
    writer.text(tensor.name);
    writer.scalar("u32", tensor.shape.length);
    for (const size of tensor.shape) writer.length(size);
    writer.scalar("u32", tensor.type);
    writer.length(tensor.offset ?? offset);
    offset += padded(tensorBytes(tensor));
  }
  writer.pad();
  const header = writer.finish();
  const bytes = new Uint8Array(header.length + (spec.hasData === false ? 0 : offset));
  bytes.set(header);
  return { bytes, lengthOffsets: writer.lengthOffsets };
}

/** Makes a file. */
export function buildGguf(spec: GgufSpec): Uint8Array {
  return buildGgufParts(spec).bytes;
}

/** Writes `general.architecture` and the architecture's own keys, its name put before each. */
export function metadataOf(
  architecture: string,
  keys: Record<string, MetadataValue>,
): [string, MetadataValue][] {
  return [
    ["general.architecture", architecture],
    ["general.name", `test ${architecture}`],
    ...Object.entries(keys).map(([key, value]): [string, MetadataValue] => [
      `${architecture}.${key}`,
      value,
    ]),
  ];
}

/** One small tensor, so that a file holds weights. */
export const ONE_TENSOR: TensorSpec = { name: "output_norm.weight", shape: [32], type: 0 };

/** A whole small file of an architecture. */
export function buildModel(architecture: string, keys: Record<string, MetadataValue>): Uint8Array {
  return buildGguf({ metadata: metadataOf(architecture, keys), tensors: [ONE_TENSOR] });
}

/** Metadata of real models, by family. Sources: the models' published files, 2026-09. */
export const FAMILIES: Record<
  string,
  { architecture: string; keys: Record<string, MetadataValue> }
> = {
  "Llama-3-8B": plain("llama", [32, 4096, 32, 8], 8192, 128256),
  "Mistral-7B-v0.2": plain("llama", [32, 4096, 32, 8], 32768, 32000, {
    "attention.sliding_window": 4096,
  }),
  "Qwen2.5-7B": plain("qwen2", [28, 3584, 28, 4], 131072, 152064),
  "Qwen3-8B": plain("qwen3", [36, 4096, 32, 8], 40960, 151936, headOf(128)),
  "Qwen3-30B-A3B": plain("qwen3moe", [48, 2048, 32, 4], 40960, 151936, headOf(128)),
  "Phi-4": plain("phi3", [40, 5120, 40, 10], 16384, 100352, { "attention.sliding_window": 131072 }),
  "gpt-oss-20b": plain("gpt-oss", [24, 2880, 64, 8], 131072, 201088, {
    ...headOf(64),
    "attention.sliding_window": 128,
  }),
  "DeepSeek-V3": plain("deepseek2", [61, 7168, 128, 1], 163840, 129280, {
    ...headOf(576, 512),
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
  }),
  "DeepSeek-V3 without the _mla keys": plain("deepseek2", [61, 7168, 128, 128], 163840, 129280, {
    ...headOf(192, 128),
  }),
  "Gemma-3-12B": plain("gemma3", [48, 3840, 16, 8], 131072, 262208, {
    ...headOf(256),
    "attention.sliding_window": 1024,
  }),
  "Qwen3.5-9B": plain("qwen35", [32, 4096, 16, 4], 262144, 248320, {
    ...headOf(256),
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
  }),
  "Gemma-2-9B": plain("gemma2", [42, 3584, 16, 8], 8192, 256128, headOf(256)),
  "Gemma-3n-E4B": plain("gemma3n", [35, 2048, 8, 2], 32768, 262400, {
    ...headOf(256),
    "attention.sliding_window": 512,
    "attention.shared_kv_layers": 15,
  }),
  "Gemma-4 pattern": plain("gemma4", [6, 2048, 8, 2], 131072, 262144, {
    ...headOf(512),
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "attention.sliding_window": 512,
    "attention.sliding_window_pattern": [true, true, true, true, true, false],
    "attention.shared_kv_layers": 2,
  }),
  "Llama-4-Scout": plain("llama4", [48, 5120, 40, 8], 10485760, 202048, headOf(128)),
  "Command-R7B": plain("cohere2", [32, 4096, 32, 8], 8192, 256000, {
    "attention.sliding_window": 4096,
  }),
  "OLMo-2 with window": plain("olmo2", [32, 4096, 32, 32], 65536, 100278, {
    "attention.sliding_window": 4096,
  }),
  "Jamba": plain("jamba", [8, 4096, 32, 8], 262144, 65536, {
    "attention.head_count_kv": [0, 0, 0, 0, 8, 0, 0, 0],
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 8192,
    "ssm.state_size": 16,
  }),
  "Granite-4-hybrid": plain("granitehybrid", [10, 1536, 12, 4], 131072, 100352, {
    "attention.head_count_kv": [0, 0, 0, 0, 0, 4, 0, 0, 0, 0],
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 3072,
    "ssm.state_size": 128,
    "ssm.group_count": 1,
  }),
  "LFM2": plain("lfm2", [6, 2048, 32, 8], 128000, 65536, {
    "attention.head_count_kv": [0, 0, 8, 0, 0, 8],
    "shortconv.l_cache": 3,
  }),
  "Qwen3-Next": plain("qwen3next", [48, 2048, 16, 2], 262144, 151936, {
    ...headOf(256),
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
  }),
  "Mamba": plain("mamba", [64, 2560, 0, 0], 1048576, 50280, {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 5120,
    "ssm.state_size": 16,
  }),
  "RWKV-6": plain("rwkv6", [32, 4096, 0, 0], 1048576, 65536, { "wkv.head_size": 64 }),
  "GLM-4.5 with a prediction layer": plain("glm4moe", [47, 4096, 96, 8], 131072, 151552, {
    ...headOf(128),
    "nextn_predict_layers": 1,
  }),
  "an unknown architecture": plain("brandnew", [10, 1024, 8, 8], 4096, 32000),
  "DeepSeek-V3.2": plain("deepseek32", [61, 7168, 128, 1], 163840, 129280, {
    ...headOf(576, 512),
    "attention.indexer.head_count": 64,
  }),
};

function plain(
  architecture: string,
  [layers, embedding, heads, kvHeads]: [number, number, number, number],
  context: number,
  vocab: number,
  more: Record<string, MetadataValue> = {},
): { architecture: string; keys: Record<string, MetadataValue> } {
  const keys = {
    "block_count": layers,
    "context_length": context,
    "embedding_length": embedding,
    "attention.head_count": heads,
    "attention.head_count_kv": kvHeads,
    "vocab_size": vocab,
    ...more,
  };
  return { architecture, keys };
}

function headOf(key: number, value = key): Record<string, MetadataValue> {
  return { "attention.key_length": key, "attention.value_length": value };
}

/** The whole small file of a family. */
export function buildFamily(name: string): Uint8Array {
  const family = FAMILIES[name];
  if (family === undefined) throw new RangeError(`Cannot build family "${name}": not in the table`);
  return buildModel(family.architecture, family.keys);
}

// Interface A's whole round trip, typed by the document alone: accept, poll, upscale, download.
import createClient from "openapi-fetch";
import type { components, paths } from "./generated/a.js";

type StatusRecord = components["schemas"]["StatusRecord"];

const [baseUrl, key, loraId] = process.argv.slice(2) as [string, string, string];
const client = createClient<paths>({ baseUrl, headers: { Authorization: `Bearer ${key}` } });

async function ended(request_id: string): Promise<StatusRecord> {
  for (;;) {
    const { data, error } = await client.GET("/v1/generate/{request_id}", { params: { path: { request_id } } });
    if (error) throw new Error(error.error.code);
    if (data.status !== "processing") return data;
    const progress: number = data.progress;
    // @ts-expect-error a record that is processing has no images
    data.images;
    console.error(`progress ${progress}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

function image(record: StatusRecord): components["schemas"]["Image"] {
  if (record.status !== "completed") throw new Error(record.status);
  const [first] = record.images;
  if (first === undefined) throw new Error("no image");
  return first;
}

// The document names defaults, and with its own switches openapi-typescript then wants every such field.
const usual = { lora_weight: 0.75, height: 512, num_images: 1, guidance_scale: 7.5, steps: 30 } as const;
const accepted = await client.POST("/v1/generate", {
  params: { header: { "Idempotency-Key": "typescript-1" } },
  body: { ...usual, prompt: "purple mountains", lora_id: loraId, width: 768, seed: 7 },
});
if (accepted.error) throw new Error(accepted.error.error.message);
const small = image(await ended(accepted.data.request_id));

const upscaled = await client.POST("/v1/upscale", { body: { image_id: small.image_id, scale_factor: 2 } });
if (upscaled.error) throw new Error(upscaled.error.error.message);
const large = image(await ended(upscaled.data.request_id));

// @ts-expect-error the document allows 512 and 768
const refused = await client.POST("/v1/generate", { body: { ...usual, prompt: "x", lora_id: loraId, width: 640 } });
const png = await fetch(large.url);
console.log(JSON.stringify([large.width, refused.error?.error.code, png.headers.get("content-type")]));

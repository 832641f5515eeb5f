// The round trip of the LoRAs' document, typed by it alone: upload, find, change, refuse, delete.
import { openAsBlob } from "node:fs";
import createClient from "openapi-fetch";
import type { components, paths } from "./generated/loras.js";

const [baseUrl, key, file] = process.argv.slice(2) as [string, string, string];
const client = createClient<paths>({ baseUrl, headers: { Authorization: `Bearer ${key}` } });

const form = new FormData();
for (const [name, value] of Object.entries({ name: "TypeScript's", base_model: "pocket" })) form.append(name, value);
form.append("file", await openAsBlob(file), "ink.safetensors");
const added = await client.POST("/v1/loras", {
  body: { name: "TypeScript's", base_model: "pocket", file: "" },
  bodySerializer: () => form,
});
if (added.error) throw new Error(added.error.error.message);
const lora: components["schemas"]["Lora"] = added.data;
const listed = await client.GET("/v1/loras", { params: { query: { name: lora.name } } });
if (listed.data?.loras[0]?.id !== lora.id) throw new Error(JSON.stringify(listed));

const params = { path: { lora_id: lora.id } };
const changed = await client.PATCH("/v1/loras/{lora_id}", { params, body: { trigger_words: ["ink drawing"] } });
// @ts-expect-error a reference names a digest or a source in text
const refused = await client.POST("/v1/loras", { body: { name: "x", base_model: "pocket", sha256: 0 } });
await client.DELETE("/v1/loras/{lora_id}", { params });
const gone = await client.GET("/v1/loras/{lora_id}", { params });
console.log(JSON.stringify([changed.data?.trigger_words[0], refused.error?.error.code, gone.error?.error.code]));

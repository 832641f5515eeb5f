-- include permission
-- include lora
-- args: rows, kept, set_aside, base_models, digests
-- apply_catalog: make the LoRAs of the catalog file those of `rows` (JSON: {id, order, digest, record}). A row that
-- left the file is withdrawn, unless `kept` (JSON: ids of rows that are set aside) names it. LoRAs that were registered
-- stay as they are. Returns the ids of rows that bear the id of a registered LoRA.
local taken, is_listed = {}, {}
for _, id in ipairs(cjson.decode(kept)) do is_listed[id] = true end
for _, row in ipairs(cjson.decode(rows)) do
  is_listed[row.id] = true
  local known = redis.call('HMGET', K('lora:' .. row.id), 'source', 'row')
  if known[1] and known[1] ~= 'file' then
    taken[#taken + 1] = row.id
  elseif known[2] ~= row.digest then
    row.record.row = row.digest
    write_lora(row.id, row.order, row.record)
    redis.call('SADD', K('catalog_rows'), row.id)
  end
end
for _, id in ipairs(redis.call('SMEMBERS', K('catalog_rows'))) do
  if not is_listed[id] then
    remove_lora(id)
    redis.call('SREM', K('catalog_rows'), id)
  end
end
redis.call('DEL', K('catalog_digests'))
for uri, digest in pairs(cjson.decode(digests)) do redis.call('HSET', K('catalog_digests'), uri, digest) end
redis.call('HSET', K('catalog'), 'applied', now, 'set_aside', set_aside, 'base_models', base_models,
  'taken', table.concat(taken, ' '))
return taken

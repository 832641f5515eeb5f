-- include lora
-- include pools
-- args: rows, kept, set_aside, new_base_models, widths, digests
-- apply_catalog: make the LoRAs of the catalog file those of `rows` (JSON: {id, order, digest, record}). A row that
-- left the file is withdrawn, unless `kept` (JSON: ids of rows that are set aside) names it. LoRAs that were registered
-- stay as they are. Returns the ids of rows that bear the id of a registered LoRA.

-- Let the reaper look at the waiting jobs of base models that are in another pool than before.
local function move_jobs()
  local before, moved = {}, {}
  for _, model in ipairs(base_models()) do before[model.id] = pool_of(model) end
  for _, model in ipairs(cjson.decode(new_base_models)) do
    know_pool(pool_of(model))
    if before[model.id] ~= pool_of(model) then moved[model.id] = true end
  end
  if not next(moved) then return end
  local function waits(index) return redis.call('EXISTS', K('lora_jobs:' .. index)) == 1 end
  for id in pairs(moved) do
    if waits('base:' .. id) then withdraw('base:' .. id) end
  end
  for _, id in ipairs(redis.call('ZRANGE', K('loras'), 0, -1)) do
    if waits(id) and moved[redis.call('HGET', K('lora:' .. id), 'base_model')] then withdraw(id) end
  end
end

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
move_jobs()
redis.call('HSET', K('catalog'), 'applied', now, 'set_aside', set_aside, 'base_models', new_base_models,
  'widths', widths, 'taken', table.concat(taken, ' '))
return taken

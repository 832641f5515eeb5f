-- include lora
-- args: rows, gone:list
-- apply_rows: make some rows of the catalog file its LoRAs (JSON: {id, order, digest, record}), and withdraw those that
-- are `gone` from it. LoRAs that were registered stay as they are. Returns the ids of rows that bear the id of one.
local taken = {}
for _, row in ipairs(cjson.decode(rows)) do
  local known = redis.call('HMGET', K('lora:' .. row.id), 'source', 'row')
  if known[1] and known[1] ~= 'file' then
    taken[#taken + 1] = row.id
  elseif known[2] ~= row.digest then
    row.record.row = row.digest
    write_lora(row.id, row.order, row.record)
    redis.call('SADD', K('catalog_rows'), row.id)
  end
end
for _, id in ipairs(gone) do
  if redis.call('SREM', K('catalog_rows'), id) == 1 then remove_lora(id) end
end
return taken

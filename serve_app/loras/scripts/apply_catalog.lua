-- include permission
-- include pools
-- args: new_base_models, widths
-- apply_catalog: begin to apply the catalog file, which `apply_rows` goes on with and `end_catalog` ends: until then
-- the base models are those of before and the file's. Returns {when the file was applied last, or '', base models whose
-- jobs are to wait in another pool than before, each with a line's end}. These are kept until the end, so that whoever
-- applies the file after a process was killed knows them.
local before, moved = {}, redis.call('HGET', K('catalog'), 'moved') or ''
for _, model in ipairs(base_models()) do before[model.id] = pool_of(model) end
for _, model in ipairs(cjson.decode(new_base_models)) do
  know_pool(pool_of(model))
  if before[model.id] ~= pool_of(model) then moved = moved .. model.id .. '\n' end
end
redis.call('HSET', K('catalog'), 'base_models', new_base_models, 'widths', widths, 'moved', moved)
for id in string.gmatch(moved, '[^\n]+') do
  if redis.call('EXISTS', K('lora_jobs:base:' .. id)) == 1 then withdraw('base:' .. id) end
end
return {redis.call('HGET', K('catalog'), 'applied') or '', moved}

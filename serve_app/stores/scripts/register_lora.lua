-- include lora
-- args: lora, order, record
-- register_lora: add a LoRA whose id the caller has made; `record` is JSON. Repeating the call changes nothing. Returns 1, or 0 when
-- the id is in use.
local held = redis.call('HGET', K('lora:' .. lora), 'source')
if held then return held == 'registered' and 1 or 0 end
write_lora(lora, order, cjson.decode(record))
return 1

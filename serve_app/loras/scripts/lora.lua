-- include permission
-- include revision
-- A LoRA's record and the indexes that find it: one of all, one of those open to everyone, one for each owner, for each
-- account or name that it is offered to, and, of registered ones, for each digest of stored weights. A record's
-- `accounts` are JSON, its `open` is '1' or '', and `order` is its place by creation.
local function unindex_lora(id)
  log_change(id)
  local record = redis.call('HMGET', K('lora:' .. id), 'owner', 'accounts', 'sha256')
  redis.call('ZREM', K('loras'), id)
  redis.call('ZREM', K('loras_open'), id)
  if record[1] then redis.call('ZREM', K('loras_owned:' .. record[1]), id) end
  if record[3] then redis.call('SREM', K('loras_stored:' .. record[3]), id) end
  for _, name in ipairs(cjson.decode(record[2] or '[]')) do redis.call('ZREM', K('loras_offered:' .. name), id) end
end

local function write_lora(id, order, record)
  unindex_lora(id)
  if redis.call('EXISTS', K('lora:' .. id)) == 1 then withdraw(id) end -- it may be offered to fewer now
  local fields = {'order', order}
  for name, value in pairs(record) do
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  redis.call('DEL', K('lora:' .. id))
  redis.call('HSET', K('lora:' .. id), unpack(fields))
  redis.call('ZADD', K('loras'), order, id)
  if record.open == '1' then redis.call('ZADD', K('loras_open'), order, id) end
  if record.source == 'registered' then redis.call('SADD', K('loras_stored:' .. record.sha256), id) end
  if record.owner ~= '' then redis.call('ZADD', K('loras_owned:' .. record.owner), order, id) end
  for _, name in ipairs(cjson.decode(record.accounts)) do redis.call('ZADD', K('loras_offered:' .. name), order, id) end
end

local function remove_lora(id)
  unindex_lora(id)
  withdraw(id)
  redis.call('HDEL', K('loras_samples'), id)
  redis.call('DEL', K('lora:' .. id))
end

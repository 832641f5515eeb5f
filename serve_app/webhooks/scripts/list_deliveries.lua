-- args: account, endpoint, most:number, looked_at:number
-- list_deliveries: an endpoint's newest `most` deliveries that have ended, and as many that wait, found among the
-- first `looked_at` that wait in the account. Returns {{message, record, next attempt (ms) or ''}, ...}.
local found, prefix = {}, endpoint .. ':'

local function add(message, due)
  local record = redis.call('HGETALL', K('webhook_delivery:' .. account .. ':' .. endpoint .. ':' .. message))
  if record[1] then found[#found + 1] = {message, record, due} end
end

local waiting = redis.call('ZRANGE', K('webhook_due:' .. account), 0, looked_at - 1, 'WITHSCORES')
for i = 1, #waiting, 2 do
  if #found >= most then break end
  if string.sub(waiting[i], 1, #prefix) == prefix then add(string.sub(waiting[i], #prefix + 1), waiting[i + 1]) end
end
for _, message in ipairs(redis.call('ZREVRANGE', K('webhook_log:' .. account .. ':' .. endpoint), 0, most - 1)) do
  add(message, '')
end
return found

-- include jobs/webhooks
-- args: limit:number, per_account:number, lease_ms:number, busy:list
-- claim_deliveries: hands out deliveries that are due, those of accounts whose have waited longest first, of each at most
-- `per_account` and none of the `busy` accounts. Each is due again after `lease_ms`, unless it has been settled: one whose
-- housekeeper died is made once more.
-- Returns {{account, endpoint, message, delivery, the endpoint's record}, ...}.
local ACCOUNTS = 1000 -- accounts that one call looks at
local is_busy, found = {}, {}
for _, account in ipairs(busy) do is_busy[account] = true end

local function claim_of(account)
  local due, most = K('webhook_due:' .. account), math.min(per_account, limit - #found)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
    local endpoint, message = string.match(name, '^([^:]*):(.*)$')
    local delivery = delivery_of(account, endpoint, message)
    if redis.call('EXISTS', delivery) == 1 then
      redis.call('HINCRBY', delivery, 'tries', 1)
      redis.call('ZADD', due, now + lease_ms, name)
      found[#found + 1] = {account, endpoint, message, redis.call('HGETALL', delivery),
        redis.call('HGETALL', K('webhook:' .. account .. ':' .. endpoint))}
    else
      redis.call('ZREM', due, name)
    end
  end
  local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', K('webhooks_due'), first[2], account)
  else
    redis.call('ZREM', K('webhooks_due'), account)
  end
end

for _, account in ipairs(redis.call('ZRANGEBYSCORE', K('webhooks_due'), '-inf', now, 'LIMIT', 0, ACCOUNTS)) do
  if #found >= limit then break end
  if not is_busy[account] then claim_of(account) end
end
return found

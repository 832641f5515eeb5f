-- include jobs/webhooks
-- args: limit:number, per_account:number, lease_ms:number, under_way:list
-- claim_deliveries: hands out deliveries that are due, of the account that has waited longest first. An account has
-- `per_account` places; `under_way` names those that are taken, as '<account> <count>'. Each delivery is due
-- again after `lease_ms`, unless it has been settled: one whose housekeeper died is made once more.
-- Returns {{account, endpoint, message, delivery, the endpoint's record}, ...}.
local ACCOUNTS = 1000 -- accounts that one call looks at
local CLAIMED_FROM = 64 -- so many of them have a place; those that turn out to have nothing due go behind the others
local taken, found, claimed_from = {}, {}, 0
for _, each in ipairs(under_way) do
  local account, count = string.match(each, '^(.*) (%d+)$')
  taken[account] = tonumber(count)
end

local function claim_of(account, most)
  local due = K('webhook_due:' .. account)
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
  if #found >= limit or claimed_from >= CLAIMED_FROM then break end
  local free = per_account - (taken[account] or 0)
  if free > 0 then
    claim_of(account, math.min(free, limit - #found))
    claimed_from = claimed_from + 1
  end
end
return found

-- include queue
-- accept: every check first, then every write: after this script the job exists whole, or not at all.
-- ARGV: job id, kind, variant, account, group, work, weight, images asked, request, receipt, idempotency digest or '',
--       body digest, cap of all waiting, cap per account, idempotency ms, index ms, adapter id or '' (none to ask about),
--       whether the catalog file lets the account use it ('1' or '0'). A call is repeated with its job id.
-- Returns {status, snapshot}; status: ok, forbidden, replay, conflict, full, account_full.
local id, kind, variant, account, group = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local work, weight, images, request, receipt = tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local digest, body = ARGV[11], ARGV[12]
local cap, account_cap = tonumber(ARGV[13]), tonumber(ARGV[14])
local idempotency_life, index_life = tonumber(ARGV[15]), tonumber(ARGV[16])
local adapter, is_open = ARGV[17], ARGV[18] == '1'

-- the same call again, because its reply was lost: the caller minted the id, so it is the caller's own job
if redis.call('EXISTS', K('job:' .. id)) == 1 then return {'ok', snapshot(id)} end

local granted = redis.call('HGET', K('grants:' .. account), adapter) -- by the operator, over the file
if granted == 'deny' or not (granted or is_open) then return {'forbidden', {}} end

local once = K('idem:' .. account .. ':' .. variant .. ':' .. digest)
if digest ~= '' then
  local before = redis.call('HMGET', once, 'job', 'body')
  if before[1] and redis.call('EXISTS', K('job:' .. before[1])) == 1 then
    if before[2] ~= body then return {'conflict', {}} end
    return {'replay', snapshot(before[1])}
  end
end

local waiting = 0
for _, each in ipairs(KINDS) do waiting = waiting + redis.call('ZCARD', K('age:' .. each)) end
if waiting >= cap then return {'full', {}} end
if num(redis.call('HGET', K('live'), account), 0) >= account_cap then return {'account_full', {}} end

local sequence = redis.call('INCR', K('sequence'))
redis.call('HSET', K('job:' .. id), 'state', 'queued', 'kind', kind, 'variant', variant, 'account', account,
  'group', group, 'work', work, 'weight', weight, 'images_asked', images, 'request', request, 'created', now,
  'since', now, 'sequence', sequence)
if receipt ~= '' then redis.call('HSET', K('job:' .. id), 'receipt', receipt) end
if digest ~= '' then
  redis.call('HSET', once, 'job', id, 'body', body)
  redis.call('PEXPIRE', once, idempotency_life)
end
redis.call('HINCRBY', K('live'), account, 1)
redis.call('HINCRBY', K('load:' .. kind), 'work', work)
redis.call('HINCRBY', K('count'), 'accepted', 1)
put_in_queue(read_job(id))

local own = K('jobs:' .. account)
redis.call('ZADD', own, now, id)
redis.call('ZREMRANGEBYSCORE', own, '-inf', now - index_life)
redis.call('PEXPIRE', own, index_life)
redis.call('ZADD', K('recent'), now, id)
redis.call('ZREMRANGEBYRANK', K('recent'), 0, -RECENT - 1)
return {'ok', snapshot(id)}

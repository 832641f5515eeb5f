-- include queue
-- include accounts/window
-- include acceptance
-- args: jobs
-- accept_all: all requests of an account's owner, each counted in the plan, or none of them. `jobs`: JSON, as
-- `write_job` takes each; its `rate_token` names the request that is counted for it. A call is repeated with its job
-- ids.
-- Returns {status, snapshots, requests that the plan leaves}; status: ok, unknown (no such account, or a disabled one),
-- forbidden, limited (the plan leaves fewer), full, account_full, account_stored.
local all = cjson.decode(jobs)

local function snapshots()
  local found = {}
  for i, job in ipairs(all) do found[i] = snapshot(read_job(job.id)) end
  return found
end

-- the same call again, because its reply was lost
if redis.call('EXISTS', K('job:' .. all[1].id)) == 1 then return {'ok', snapshots(), 0} end

local owner = redis.call('HMGET', K('account:' .. account), 'name', 'disabled', 'plan_' .. interface)
if not owner[1] or owner[2] then return {'unknown', {}, 0} end
for _, job in ipairs(all) do
  if not may_use_all(job.loras) then return {'forbidden', {}, 0} end
end
local full = no_space(#all)
if full then return {full, {}, 0} end
local left = requests_left(account, owner[3])
if left < #all then return {'limited', {}, left} end

for _, job in ipairs(all) do
  count_request(job.rate_token, account, owner[3], '', nil)
  write_job(job)
end
return {'ok', snapshots(), left - #all}

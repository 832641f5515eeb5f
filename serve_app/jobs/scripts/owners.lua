-- Which workers hold the weights of a LoRA, so that its jobs are left to them for a moment.
local OWNER_LIFE = 600000  -- ms that a worker is remembered as the owner of weights that it loaded
local MAX_OWNERS = 32      -- the most remembered for each: a popular adapter's latest owners are its busiest

local function add_owner(pool, weights, worker)
  local owners = K('owner:' .. pool .. ':' .. weights)
  local is_new = redis.call('ZADD', owners, now, worker) == 1
  if is_new then redis.call('ZREMRANGEBYRANK', owners, 0, -MAX_OWNERS - 1) end
  redis.call('PEXPIRE', owners, OWNER_LIFE)
end

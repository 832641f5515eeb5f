-- Who needs an image, and until when (ms): a job, `inf` before it has ended and then as long as its record lives;
-- `kept` if it was uploaded on purpose; and a call that has brought it, until it has asked for its job.
local LONGEST_WAIT = 30 * 86400000 -- ms, far beyond any wait of a job

local function uses_of(image_id) return K('image_uses:' .. image_id) end

local function use_image(image_id, user, ends, lasts_ms)
  local uses = uses_of(image_id)
  local over = redis.call('ZRANGEBYSCORE', uses, '-inf', now, 'LIMIT', 0, 100)
  if over[1] then redis.call('ZREM', uses, unpack(over)) end
  redis.call('ZADD', uses, ends, user)
  if redis.call('PTTL', uses) < lasts_ms then redis.call('PEXPIRE', uses, lasts_ms) end
end

local function begin_uses(job)
  for _, image_id in ipairs(job.pictures) do use_image(image_id, job.id, '+inf', LONGEST_WAIT) end
end

-- End one use of an image, and have `remove_due_uploads` look whether anything else needs it.
local function end_use(image_id, user)
  redis.call('ZREM', uses_of(image_id), user)
  redis.call('ZADD', K('uploads_due'), 'XX', 0, image_id)
end

-- Return until when an image is needed, 0 if it is not, and by whom.
local function needed_until(image_id)
  local user, ends = unpack(redis.call('ZREVRANGE', uses_of(image_id), 0, 0, 'WITHSCORES'))
  local state = ends == 'inf' and redis.call('HGET', K('job:' .. user), 'state')
  if not user then return 0 end
  if ends ~= 'inf' then return tonumber(ends), user end
  if state == 'queued' or state == 'running' then return math.huge, user end
  -- a worker of the version before has ended it
  redis.call('ZADD', uses_of(image_id), now + redis.call('PTTL', K('job:' .. user)), user)
  return needed_until(image_id)
end

-- Return a job that has not ended and needs one of the images; nil if there is none.
local function unfinished_user(image_ids)
  for _, image_id in ipairs(image_ids) do
    local ends, user = needed_until(image_id)
    if ends == math.huge then return user end
  end
end

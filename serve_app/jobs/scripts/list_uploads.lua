-- include page
-- args: account
-- list_uploads: an account's uploaded images, newest first. Returns {{id, time} of each, {id, time} of the last that was
-- looked at, or {} when there are no more}.
local found, last = page(K('uploads:' .. account), after_ms or '+inf', most + SAME_MS, function(id)
  return redis.call('EXISTS', K('upload:' .. id)) == 1 -- the version before deletes a record and leaves its place here
end)
return {found, last}

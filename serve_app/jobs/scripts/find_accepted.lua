-- include queue
-- include repeats
-- args: loras
-- find_accepted: what accept.lua would answer to the repeat of a call that made a job, for one that can no longer be
-- resolved, since its picture or base model is gone; {} where no call did. `loras`: JSON, as in accept.lua.
return forbidden_or_repeat(cjson.decode(loras)) or {}

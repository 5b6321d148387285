// Tells stored data that is missing or damaged, which is made again, from data that could not be
// read now, which is not: making it again would cost the most when the disk is slowest.
//
// Thread-safety: a pure function.
#pragma once

#include "prefixd/result.h"

namespace prefixd {

// Whether a read failed with an error that says nothing about the stored bytes.
inline bool Unread(const Error& error) {
  switch (error.code) {
    case Code::kIo:
    case Code::kUnavailable:
    case Code::kResourceExhausted:
    case Code::kDeadlineExceeded:
    case Code::kCancelled:
      return true;
    default:
      return false;
  }
}

}  // namespace prefixd

// What the core refuses before it sizes any memory: values that make no sense, and sizes whose products would overflow.
#pragma once
#include "config.h"

namespace kdtree {

// Throw `<field>: <value>: <reason>`. What only an operator knows (group sizes, the router's groups) its refuse() says.
void check_model(const ModelConfig& config);
void check_options(const EngineOptions& options);
void check_request(const Request& request, const ModelConfig& config, const EngineOptions& options);

constexpr int32_t kMaxStopIds = 1024;

}  // namespace kdtree
